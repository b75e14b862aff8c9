"""Spark's `TorchEstimator` with compressed gradients: `gradient_compression=` is Horovod's `compression=`.

    python spark_estimator.py                                      # on this machine
    spark-submit --py-files train.py spark_estimator.py            # on a cluster; the store where all nodes see it

The estimator owns the training loop and calls `controller.step` nowhere: choose a constant level.
"""

import tempfile

import torch
from horovod.spark.common.backend import SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.ml.linalg import DenseVector, VectorUDT
from pyspark.sql import SparkSession
from pyspark.sql.types import LongType, StructField, StructType
from torch.nn.functional import cross_entropy

import train
from hvd_dyncomp import Controller, DynamicQuantizer, Static

WORKERS = 2


def main(store):
    spark = SparkSession.builder.appName("hvd_dyncomp").master(f"local[{WORKERS}]").getOrCreate()
    rows, classes = train.made_up_data(2048, seed=1)
    table = [(DenseVector(row), int(label)) for row, label in zip(rows.tolist(), classes, strict=True)]
    schema = StructType([StructField("features", VectorUDT()), StructField("label", LongType())])
    frame = spark.createDataFrame(table, schema).repartition(WORKERS)

    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))
    estimator = TorchEstimator(
        backend=SparkBackend(num_proc=WORKERS, use_gloo=True),
        store=Store.create(store),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        loss=lambda output, label: cross_entropy(output, label.long()),
        gradient_compression=DynamicQuantizer(Controller(Static(4))),
        feature_cols=["features"],
        label_cols=["label"],
        input_shapes=[[-1, 32]],
        batch_size=64,
        epochs=6,
        verbose=0,
    )
    fitted = estimator.fit(frame)
    with torch.no_grad():
        accuracy = (fitted.getModel()(rows).argmax(1) == classes).float().mean()
    print(f"accuracy {accuracy:.3f}", flush=True)
    spark.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(f"file://{folder}")
