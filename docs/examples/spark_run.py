"""Spark: `train.py` in two tasks of a Spark application.

    python spark_run.py                                            # on this machine
    spark-submit --py-files train.py spark_run.py                  # on a cluster

On every node: Java and Spark, and Horovod and this package as on the driver. Workers talk over Gloo here, which needs
no launcher of MPI's on the driver.
"""

import json

import cloudpickle
import horovod.spark
from pyspark.sql import SparkSession

import train

WORKERS = 2
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

if __name__ == "__main__":
    cloudpickle.register_pickle_by_value(train)  # tasks need no copy of train.py
    spark = SparkSession.builder.appName("hvd_dyncomp").master(f"local[{WORKERS}]").getOrCreate()
    for seen in horovod.spark.run(train.train, num_proc=WORKERS, use_gloo=True, env=ENVIRONMENT):
        print(json.dumps(seen), flush=True)
    spark.stop()
