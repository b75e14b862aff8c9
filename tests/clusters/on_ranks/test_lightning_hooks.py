"""What a Trainer may do with its callback, on every rank of a process group."""

from __future__ import annotations

import os
import tempfile

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from hvd_dyncomp import Schedule, less_momentum
from hvd_dyncomp.integrations.lightning import CompressionCallback

RANKS = int(os.environ["WORLD_SIZE"])
STEPS = 192 // RANKS // 16  # of an epoch
torch.manual_seed(0)
INPUTS = torch.randn(192, 32)
DATA = TensorDataset(INPUTS, INPUTS @ torch.randn(32, 64))


class Module(L.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.lr = 0.02
        self.layer = torch.nn.Linear(32, 64)

    def training_step(self, batch):
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch):
        loss = mse_loss(self.layer(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_worst", loss, reduce_fx="max", sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class TwoOptimizers(Module):
    """As a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.other = torch.nn.Linear(64, 32)

    def training_step(self, batch):
        for optimizer, loss in zip(self.optimizers(), (self.first, self.second), strict=True):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(loss(batch))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def first(self, batch):
        return mse_loss(self.layer(batch[0]), batch[1])

    def second(self, batch):
        return mse_loss(self.other(self.layer(batch[0]).detach()), batch[0])

    def configure_optimizers(self):
        return [torch.optim.SGD(each.parameters(), lr=0.02) for each in (self.layer, self.other)]


def trainer(*callbacks: Callback, kind: type = L.Trainer, **options) -> L.Trainer:
    usual = {"accelerator": "cpu", "devices": RANKS, "strategy": "ddp", "max_epochs": 4, "callbacks": list(callbacks)}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return kind(**{**usual, **quiet, "enable_checkpointing": False, **options})


def train() -> DataLoader:
    return DataLoader(DATA, 16, shuffle=True)


def valid() -> DataLoader:
    return DataLoader(DATA, 16)


def parameters(module: L.LightningModule) -> torch.Tensor:
    """The module's, which all ranks have."""
    mine = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    everyone = [torch.empty_like(mine) for _ in range(RANKS)]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(theirs, mine) for theirs in everyone), "ranks have different parameters"
    return mine


def fitted(callback: CompressionCallback, module: L.LightningModule | None = None, **options) -> torch.Tensor:
    module = module or Module()
    trainer(callback, **options).fit(module, train(), valid())
    return parameters(module)


@pytest.fixture(autouse=True, scope="module")
def process_group():
    """Lightning's trainers take it."""
    dist.init_process_group("gloo")
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder():
    """One on all ranks."""
    with tempfile.TemporaryDirectory() as mine:
        shared = [mine]
        dist.broadcast_object_list(shared)
        yield shared[0]
        dist.barrier()


def test_a_second_fit_continues(folder):
    """At 1 bit, where residuals matter, as one fit of all epochs. What validates in between loads an older state."""
    whole, callback, module = CompressionCallback(1), CompressionCallback(1), Module()
    expected = fitted(whole)
    twice = trainer(callback, max_epochs=1)
    twice.fit(module, train(), valid())
    twice.save_checkpoint(f"{folder}/first.ckpt")
    twice.fit_loop.max_epochs = 2
    twice.fit(module, train(), valid())
    begun = {name: value.clone() for name, value in module.state_dict().items()}
    twice.validate(module, valid(), ckpt_path=f"{folder}/first.ckpt", verbose=False)
    twice.test(module, valid(), verbose=False)
    module.load_state_dict(begun)
    twice.fit_loop.max_epochs = 4
    twice.fit(module, train(), valid())
    assert torch.equal(parameters(module), expected)
    one, other = callback.quantizer, whole.quantizer
    assert one.meter.total().steps == other.meter.total().steps == one.state_dict()["steps"] == 4 * STEPS
    assert len(one.controller.history) == 4


def test_the_controller_gets_what_validation_logs():
    callback = CompressionCallback(Schedule({0: 4, 1: 8}))
    fitted(callback, max_epochs=2, num_sanity_val_steps=1)
    assert [record.bits for record in callback.quantizer.controller.history] == [8, 8]
    for record in callback.quantizer.controller.history:
        assert set(record.metrics) == {"val_loss", "val_worst"}
        assert record.metrics["val_loss"] < record.metrics["val_worst"]
    callback = CompressionCallback(4, metrics=["train_loss_step", "val_loss"])
    fitted(callback, max_epochs=2, val_check_interval=0.5)
    assert [set(record.metrics) for record in callback.quantizer.controller.history] == [
        {"train_loss_step", "val_loss"}
    ] * 4


def test_a_checkpoint_within_an_epoch(folder):
    """All batches are equal: Lightning does not keep the order of data within an epoch."""
    rows = TensorDataset(INPUTS[:1].expand(192, -1), DATA.tensors[1][:1].expand(192, -1))
    results = []
    for path in (None, f"{folder}/epoch=0-step=3.ckpt"):
        callback, module = CompressionCallback(1), Module()
        saving = ModelCheckpoint(folder, every_n_train_steps=3, save_top_k=-1)
        fits = trainer(callback, saving, max_epochs=2, enable_checkpointing=True)
        fits.fit(module, DataLoader(rows, 16), valid(), ckpt_path=path)
        results.append((parameters(module), callback.quantizer.state_dict()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1]["steps"] == results[1][1]["steps"]


def test_two_optimizers():
    for bits in (4, 0.25):
        callback, module = CompressionCallback(bits), TwoOptimizers()
        before = [module.first(DATA[:]).item(), module.second(DATA[:]).item()]
        fitted(callback, module, strategy="ddp_find_unused_parameters_true")
        assert module.first(DATA[:]).item() < before[0] and module.second(DATA[:]).item() < before[1]
        total = callback.quantizer.meter.total()
        assert total.steps == 4 * STEPS * 2 and total.sent_bytes < 0.3 * total.float32_bytes


class WithMomentum(Module):
    def __init__(self, change):
        super().__init__()
        self.change = change

    def configure_optimizers(self):
        optimizer = self.change(torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def test_less_momentum():
    """The quantizer finds the optimizer, behind Lightning's wrapper."""
    for bits, alike in ((4, True), (1, False)):
        with_it = fitted(CompressionCallback(bits), WithMomentum(lambda optimizer: optimizer))
        without_it = fitted(CompressionCallback(bits), WithMomentum(less_momentum))
        assert torch.equal(with_it, without_it) == alike


def test_under_its_other_name():
    pl = pytest.importorskip("pytorch_lightning")
    methods = ("training_step", "validation_step", "configure_optimizers")
    module = type("Other", (pl.LightningModule,), {name: vars(Module)[name] for name in methods})()
    module.layer, module.lr = torch.nn.Linear(32, 64), 0.02
    callback = CompressionCallback(4)
    other = trainer(callback, kind=pl.Trainer, max_epochs=1, callbacks=callback)
    other.fit(module, train(), valid())
    assert len(callback.quantizer.controller.history) == 1
