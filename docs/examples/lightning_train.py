"""PyTorch Lightning 1.9.5, the last one with a Horovod strategy, or 2.0.9 with lightning-Horovod.

    horovodrun -np 2 python lightning_train.py

The strategy makes the `hvd.DistributedOptimizer`; one method of it is all that needs to change.
"""

import json

import horovod.torch as hvd
import pytorch_lightning as pl
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import train
from hvd_dyncomp import DynamicQuantizer

try:
    from pytorch_lightning.strategies import HorovodStrategy
except ImportError:  # Lightning 2
    from lightning_horovod.strategy import HorovodStrategy
    from pytorch_lightning.plugins.environments import MPIEnvironment

    # Where mpi4py is installed, Lightning would take mpirun's ranks for its own, and they would wait for ever.
    MPIEnvironment.detect = staticmethod(lambda: False)


class CompressedHorovodStrategy(HorovodStrategy):
    """Lightning's strategy with compressed gradients.

    Args:
        compression: a `DynamicQuantizer`; it serves one optimizer, so the module has one.
    """

    is_distributed = True  # or else Lightning 2 gives every rank all of the data

    def __init__(self, compression, **arguments):
        super().__init__(**arguments)
        self.compression = compression

    def _wrap_optimizers(self, optimizers, accumulate_grad_batches):
        (optimizer,) = optimizers
        if hasattr(optimizer, "skip_synchronize"):
            return optimizers
        return [
            hvd.DistributedOptimizer(
                optimizer,
                named_parameters=self._filter_named_parameters(self.lightning_module, optimizer),
                backward_passes_per_step=accumulate_grad_batches,
                compression=self.compression,
            )
        ]


class StepController(pl.Callback):
    """Tells the controller each epoch's metrics: it compares the ranks' models, and may choose another level."""

    def __init__(self, controller):
        self.controller = controller

    def on_train_epoch_end(self, trainer, module):
        seen = trainer.callback_metrics
        self.controller.step({"val_accuracy": seen["val_accuracy"], "train_loss": seen["train_loss"]})


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))

    def training_step(self, batch, _):
        rows, classes = batch
        loss = cross_entropy(self.layers(rows), classes)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, _):
        rows, classes = batch
        self.log("val_accuracy", (self.layers(rows).argmax(1) == classes).float().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)  # Lightning multiplies it by hvd.size()


if __name__ == "__main__":
    hvd.init()
    quantizer = DynamicQuantizer(4)
    model = Classifier()
    trainer = pl.Trainer(
        strategy=CompressedHorovodStrategy(quantizer),
        callbacks=[StepController(quantizer.controller)],
        accelerator="cpu",
        devices=hvd.local_size(),  # Lightning 2 would take one; 1.9 looks it up itself
        max_epochs=6,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    # lightning-Horovod looks for it there, where Lightning 2.0.9 has none.
    if not hasattr(trainer, "accumulation_scheduler"):
        trainer.accumulation_scheduler = pl.callbacks.GradientAccumulationScheduler({0: 1})
    # Lightning gives each rank its share of these.
    rows = DataLoader(TensorDataset(*train.made_up_data(4096, seed=1)), batch_size=64, shuffle=True)
    held_out = DataLoader(TensorDataset(*train.made_up_data(1024, seed=1001)), batch_size=64)
    trainer.fit(model, rows, held_out)
    print(json.dumps(train.report(model, quantizer)), flush=True)
