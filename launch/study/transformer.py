"""A small language model: characters in, next characters out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Layer(nn.Module):
    """Attention to what came before, then two linear layers; each on normalised input and added to it.

    Input and output float32 (batch, length, width).
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_linear = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.attended = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wider, self.narrower = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.query_key_value(self.before_attention(x)).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.attended(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.narrower(F.gelu(self.wider(self.before_linear(x))))


class Transformer(nn.Module):
    """Layers between an embedding of characters and places, and logits.

    Args:
        characters: how many different ones there are.
        width: values of each place; a multiple of `heads`.
        context: the longest input.

    Input int64 (batch, length), output float32 (batch, length, characters).
    """

    def __init__(self, characters: int, *, width: int, context: int, layers: int = 2, heads: int = 4) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(characters, width), nn.Embedding(context, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.last, self.logits = nn.LayerNorm(width), nn.Linear(width, characters, bias=False)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.characters(x) + self.places(torch.arange(x.shape[1]))
        return self.logits(self.last(self.layers(hidden)))
