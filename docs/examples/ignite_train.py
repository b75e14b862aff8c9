"""PyTorch Ignite: `idist.auto_optim` makes the `hvd.DistributedOptimizer`, and passes on what it is given beside.

    horovodrun -np 2 python ignite_train.py

`idist.Parallel(backend="horovod", nproc_per_node=2)` starts the ranks itself: `python ignite_train.py`.
"""

import json

import horovod.torch as hvd
import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_trainer
from torch.nn.functional import cross_entropy

import train
from hvd_dyncomp import DynamicQuantizer


def training(local_rank):
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    model = idist.auto_model(model)  # rank 0's, on all ranks
    quantizer = DynamicQuantizer(4)
    optimizer = idist.auto_optim(
        torch.optim.SGD(model.parameters(), lr=0.04, momentum=0.9),
        named_parameters=model.named_parameters(),  # without, two optimizers of a program would share names
        compression=quantizer,
    )
    trainer = create_supervised_trainer(model, optimizer, cross_entropy)
    rows, classes = train.made_up_data(512, seed=1001 + hvd.rank())

    @trainer.on(Events.EPOCH_COMPLETED)
    def step_the_controller(engine):  # compares the ranks' models; with a policy it moves the level
        with torch.no_grad():
            accuracy = (model(rows).argmax(1) == classes).float().mean()
        quantizer.controller.step({"val_accuracy": accuracy, "train_loss": engine.state.output})

    inputs, labels = train.made_up_data(2048, seed=1 + hvd.rank())
    trainer.run(list(zip(inputs.split(64), labels.split(64), strict=True)), max_epochs=4)
    print(json.dumps(train.report(model, quantizer)), flush=True)


# Without this line Horovod would say that there is no MPI, where ignite starts the ranks.
if __name__ == "__main__":
    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(training)
