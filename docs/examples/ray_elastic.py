"""Ray, elastic: workers come and go with the nodes of the cluster, a worker for each core up to a number.

    python ray_elastic.py                                          # a Ray of its own, on this machine
    RAY_ADDRESS=auto python ray_elastic.py --interface eth0        # on a node of a cluster

On every node: Ray, and Horovod and this package as on the others.
"""

import argparse
import json

import horovod.torch as hvd
import ray
from horovod.ray import RayExecutor

import train


def train_elastically(epochs):
    """`train.train` in an elastic job: what it needs to go on with other workers is in one state."""
    hvd.init()
    model, quantizer, optimizer = train.build()
    controller = quantizer.controller
    state = hvd.elastic.TorchState(model, optimizer, quantizer=quantizer, controller=controller, epoch=0)

    @hvd.elastic.run
    def loop(state):
        print(f"rank {hvd.rank()} of {hvd.size()} from epoch {state.epoch}", flush=True)
        while state.epoch < epochs:
            train.train_one_epoch(model, optimizer, controller)
            state.epoch += 1
            state.commit()

    loop(state)
    return train.report(model, quantizer)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--interface", default="lo", help="network interface that the workers share (default lo)")
    parser.add_argument("--workers", type=int, default=2, help="the most that there may be (default 2)")
    parser.add_argument("--epochs", type=int, default=6)
    args = parser.parse_args()
    ray.cloudpickle.register_pickle_by_value(train)  # workers need no copy of train.py
    ray.init()
    # Where no interface is named Horovod waits for a second node, in silence; and where all workers are on the first
    # one at the start it takes the loopback interface, which the second could not reach.
    settings = RayExecutor.create_settings(timeout_s=60, nics={"lo", args.interface})
    environment = {
        "OMP_NUM_THREADS": "1",
        "HOROVOD_GLOO_IFACE": args.interface,
        "HOROVOD_GLOO_RENDEZVOUS_ADDR": ray.util.get_node_ip_address(),
    }
    executor = RayExecutor(settings, min_workers=1, max_workers=args.workers, cpus_per_worker=1)
    executor.start(extra_env_vars=environment)
    for seen in executor.run(train_elastically, args=[args.epochs]):
        print(json.dumps(seen), flush=True)
    executor.shutdown()
    ray.shutdown()
