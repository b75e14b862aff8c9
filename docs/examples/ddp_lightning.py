"""A complete run with Lightning, which resumes: torchrun --nproc-per-node 2 ddp_lightning.py"""

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hvd_dyncomp.integrations.lightning import CompressionCallback


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch):
        inputs, classes = batch
        return cross_entropy(self.layers(inputs), classes)

    def validation_step(self, batch):
        inputs, classes = batch
        outputs = self.layers(inputs)
        self.log("val_loss", cross_entropy(outputs, classes), sync_dist=True)
        self.log("val_accuracy", (outputs.argmax(dim=1) == classes).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


L.seed_everything(0)
inputs = torch.randn(2560, 64)
classes = inputs[:, :10].argmax(dim=1)
data = TensorDataset(inputs[:2048], classes[:2048])
held_out = TensorDataset(inputs[2048:], classes[2048:])
compression = CompressionCallback(4)
trainer = L.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=4,
    gradient_clip_val=1.0,
    accumulate_grad_batches=2,
    callbacks=[compression, ModelCheckpoint("checkpoints", save_last=True)],
)
trainer.fit(Classifier(), DataLoader(data, 32, shuffle=True), DataLoader(held_out, 32), ckpt_path="last")

quantizer = compression.quantizer
if trainer.is_global_zero:
    print(f"{quantizer.meter.total().saved_fraction:.0%} of the bytes saved, now at {quantizer.bits} bits")
