"""Ray: `train.py` on two workers of a Ray cluster, or of this machine where there is none.

    python ray_static.py                        # a Ray of its own, on this machine
    RAY_ADDRESS=auto python ray_static.py       # on a node of a cluster

On every node: Ray, and Horovod and this package as on the others.
"""

import json

import ray
from horovod.ray import RayExecutor

import train

WORKERS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # as many threads as a worker has cores; workers talk over Gloo here, not MPI

if __name__ == "__main__":
    ray.cloudpickle.register_pickle_by_value(train)  # workers need no copy of train.py
    ray.init()
    executor = RayExecutor(RayExecutor.create_settings(timeout_s=60), num_workers=WORKERS, cpus_per_worker=1)
    executor.start(extra_env_vars=ENVIRONMENT)
    for seen in executor.run(train.train):
        print(json.dumps(seen), flush=True)
    executor.shutdown()
    ray.shutdown()
