"""Ray, elastic: as many workers as there is room for, one at least. Not seen to work yet (docs/clusters.md).

python ray_elastic.py                        # a Ray of its own, on this machine
RAY_ADDRESS=auto python ray_elastic.py       # on a node of a cluster
"""

import json

import horovod.torch as hvd
import ray
from horovod.ray import RayExecutor

import train

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HOROVOD_GLOO_TIMEOUT_SECONDS": "30"}


def train_elastic(epochs):
    """Trains on every worker, through changes of their number; returns what this one saw."""
    hvd.init()
    model, quantizer, optimizer = train.build()
    controller = quantizer.controller
    state = hvd.elastic.TorchState(model, optimizer, quantizer=quantizer, controller=controller, epoch=0)

    @hvd.elastic.run
    def go_on(state):
        while state.epoch < epochs:
            train.train_one_epoch(model, optimizer, controller)
            state.epoch += 1
            state.commit()

    go_on(state)
    return train.report(model, quantizer)


if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(train)  # workers need no copy of train.py
    ray.init()
    settings = RayExecutor.create_settings(timeout_s=60)
    executor = RayExecutor(settings, min_workers=1, max_workers=2, cpus_per_worker=1)
    executor.start(extra_env_vars=ENVIRONMENT)
    for seen in executor.run(train_elastic, kwargs={"epochs": 6}):
        print(json.dumps(seen), flush=True)
    executor.shutdown()
    ray.shutdown()
