"""The arguments that `ddp.compress`, `fsdp.attach`, `Averager` and `DynamicQuantizer` have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Literal, TypedDict

import torch

from hvd_dyncomp.checks import shown


class Options(TypedDict, total=False):
    """Keyword arguments of `ddp.compress`, `fsdp.attach`, `Averager`, `DynamicQuantizer` and of the callbacks.

    Attributes:
        error_feedback: add the error of a quantization to the gradient of the next step. With more than two workers, a
            mean is quantized as well, and the error of that is kept, too. Without error feedback, a small value that
            shares a scale with values a hundred times as large may never arrive. False saves the residuals' 2 bytes per
            value; use False only at 8 bits or more. Default: True.
        block_size: number of values in a block, a power of two from 64 to 65536. Buckets are divided among the workers
            in whole blocks. Below one bit, all values of a block share a scale, which costs 16 / block_size bits per
            value. From one bit on, at most 128 values share a scale, which costs 0.125 bit per value. A block_size of
            64 costs 0.25 bit per value; use it for gradients whose magnitudes differ much within 128 values. Default:
            512.
        min_numel: tensors with fewer values (biases, batch norm) are sent at 8 bits if the level is lower. Change it
            for models with many small tensors. Default: 1024.
        skip: a function of a parameter's name and the parameter. If it returns True, the parameter is sent
            uncompressed: `skip=lambda name, parameter: "embedding" in name`. It must return the same on all ranks. Use
            it for parameters that compression harms. Default: None, which skips no parameter.
        bucket_bytes: size of a bucket, the gradients that are exchanged together, in bytes of float32. Smaller buckets
            are sent earlier in backward. Larger buckets need fewer messages; use them on links with high latency.
            Default: None, which stands for 8 MiB, or with more than 8 workers for 1 MiB per worker, at most 128 MiB.
        hierarchical: whether gradients are exchanged within each host first and then between hosts, so that the bytes
            that a host sends do not grow with its number of workers. False: no, gradients are exchanged among all
            workers at once, which was faster at 1 and 2 bits on two hosts of two workers and 1 Gbit/s. Default: None,
            which stands for yes if there are several hosts with equally many workers, more than one each.
        warmup_steps: number of steps at the start of training that use at least `warmup_bits`, whatever the
            controller's level. A warm-up does not protect a run at 2 bits or less: if the learning rate is large, the
            switch to fewer bits can itself make the run diverge. The step count is part of `state_dict`, so a run that
            resumes within its warm-up ends the warm-up at the same step. Default: 0.
        warmup_bits: lowest level during the warm-up, bits per value; 32 means uncompressed. Default: 32.
    """

    error_feedback: bool
    block_size: int
    min_numel: int
    skip: Callable[[str, torch.Tensor], bool] | None
    bucket_bytes: int | None
    hierarchical: Literal[False] | None
    warmup_steps: int
    warmup_bits: float


def checked_names(named_parameters: Iterable[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    """The pairs of an argument `named_parameters`, checked.

    Raises:
        ValueError: the argument is not made of pairs, is empty, or has a name twice.
    """
    try:
        pairs = [(name, parameter) for name, parameter in named_parameters]
    except (TypeError, ValueError) as error:
        raise ValueError(f"named_parameters must be (name, parameter) pairs, got {shown(named_parameters)}") from error
    for name, parameter in pairs:
        if not isinstance(name, str) or not isinstance(parameter, torch.Tensor):
            pair, all_of_it = shown((name, parameter)), shown(named_parameters)
            raise ValueError(f"named_parameters must be (name, parameter) pairs, got {pair} in {all_of_it}")
    if not pairs:
        raise ValueError(
            f"named_parameters must name parameters, got {shown(named_parameters)}, which is empty "
            "(a generator can be read only once)"
        )
    twice = sorted(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
    if twice:
        raise ValueError(f"named_parameters must have unique names, got {twice} more than once")
    return pairs
