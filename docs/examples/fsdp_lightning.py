"""A complete run with Lightning and FSDP2, which resumes: torchrun --nproc-per-node 4 fsdp_lightning.py"""

import hashlib

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import hvd_dyncomp


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
        self.quantizer = None

    def configure_model(self):
        if self.quantizer is None:  # Lightning may call it again
            hvd_dyncomp.fsdp.register_backend(4)
            axes, ours = ("replicate", "shard"), {"replicate": "hvd_dyncomp"}
            hosts = (2, 2)  # two, of two ranks each
            mesh = init_device_mesh("cpu", hosts, mesh_dim_names=axes, backend_override=ours)
            for module in (self.layers[0], self.layers):
                fully_shard(module, mesh=mesh)
            self.quantizer = hvd_dyncomp.fsdp.attach(self.layers)

    def training_step(self, batch, index):
        last = (index + 1) % self.trainer.accumulate_grad_batches == 0 or self.trainer.is_last_batch
        self.layers.set_requires_all_reduce(last)
        inputs, classes = batch
        return cross_entropy(self.layers(inputs), classes)

    def on_train_epoch_end(self):
        self.quantizer.controller.step({})  # a policy may need metrics

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["quantizer"] = hvd_dyncomp.AllRanks(self.quantizer).state_dict()

    def on_load_checkpoint(self, checkpoint):
        hvd_dyncomp.AllRanks(self.quantizer).load_state_dict(checkpoint["quantizer"])


L.seed_everything(0)
inputs = torch.randn(2048, 64)
data = TensorDataset(inputs, inputs[:, :10].argmax(dim=1))
trainer = L.Trainer(
    accelerator="cpu",
    devices=4,
    strategy=ModelParallelStrategy(data_parallel_size=4, tensor_parallel_size=1, process_group_backend="gloo"),
    max_epochs=4,
    accumulate_grad_batches=2,
    callbacks=[ModelCheckpoint("checkpoints", save_last=True)],
)
model = Classifier()
trainer.fit(model, DataLoader(data, 32, shuffle=True), ckpt_path="last")

whole = torch.cat([parameter.full_tensor().flatten() for parameter in model.parameters()]).detach()
if trainer.is_global_zero:
    digest = hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]
    print(f"{model.quantizer.meter.total().saved_fraction:.0%} of the bytes saved; parameters {digest}")
