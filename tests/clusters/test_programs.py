"""The Python programs of docs/examples train on two workers as docs/clusters.md says."""

import re
import shutil
import sys
from importlib.metadata import version

import pytest

from common.launcher import horovodrun
from recipes import check_reports, need, said_by

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(400)]


@pytest.mark.parametrize("options", [(), ("--gloo",)], ids=["mpi", "gloo"])
def test_horovodrun(options):
    check_reports(said_by(horovodrun(2, ["train.py"], *options), 120), ranks=2)


@pytest.mark.parametrize("options", [(), ("--gloo",)], ids=["mpi", "gloo"])
def test_lightning(options):
    need("pytorch_lightning")
    if int(version("pytorch_lightning").split(".")[0]) > 1:  # 1.9 has the strategy itself
        need("lightning_horovod")
    said = said_by(horovodrun(2, ["lightning_train.py"], *options), 180)
    check_reports(said, ranks=2)
    # Six epochs, in each of which the ranks share 4096 rows.
    assert re.findall(r'"steps": (\d+)', said) == [str(6 * 4096 // 64 // 2)] * 2


@pytest.mark.parametrize("program", ["ray_static.py", "ray_elastic.py"])
def test_ray(program):
    need("ray")
    check_reports(said_by([sys.executable, program], 240), ranks=2)


def test_spark_run():
    need("pyspark")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    check_reports(said_by([sys.executable, "spark_run.py"], 240), ranks=2)


def test_spark_estimator():
    need("pyspark", "petastorm", "tensorboard")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    import pyarrow

    if int(pyarrow.__version__.split(".")[0]) >= 11:
        pytest.skip(f"Horovod 0.28.1's estimator reads Parquet in a way that pyarrow {pyarrow.__version__} has not")
    said = said_by([sys.executable, "spark_estimator.py"], 300)
    assert float(said.rpartition("accuracy ")[2].split()[0]) > 0.7
