"""The part "curves" of the benchmarks: training without Horovod, from the same weights and on the same batches."""

import gzip
import json
import os
import sys
from pathlib import Path

import pytest
import torch

from bench import __main__ as program
from bench import curves, workloads
from bench.curves import of_all
from common.launcher import run

pytestmark = pytest.mark.thorough

BENCH = str(Path(__file__).parents[2] / "launch" / "bench")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, str]:
    """A folder with the results of a run, and what was said."""
    folder = tmp_path_factory.mktemp("curves")
    (folder / "sitecustomize.py").write_text("import sys\nsys.modules['horovod'] = None\n")
    chosen = ("--models", "tiny", "--methods", "ddp,4bit-ddp", "--steps", "40", "--profile")
    command = [sys.executable, BENCH, "curves", *chosen, "--output-dir", str(folder)]
    ended = run(command, timeout=240, env={**os.environ, "PYTHONPATH": str(folder)})
    assert ended.returncode == 0, ended.stdout
    return folder, ended.stdout


def test_methods_begin_alike_learn_and_keep_replicas_equal(trained):
    folder, said = trained
    results = json.loads((folder / "curves-tiny-2-torchrun.json").read_text())
    plain, ours = (results["methods"][name] for name in ("ddp", "4bit-ddp"))
    for one in (plain, ours):
        assert len(one["losses"]) == 40 and one["steps_per_second"] > 0
        assert sum(one["losses"][-10:]) < 0.8 * sum(one["losses"][:10])
        assert one["replicas_equal"] and one["peak_bytes"] is None
    # The first loss is of the same weights on the same batches; updates differ from then on.
    assert plain["losses"][0] == ours["losses"][0] and plain["losses"][2] != ours["losses"][2]
    assert sum(ours["losses"][-10:]) == pytest.approx(sum(plain["losses"][-10:]), rel=0.2)
    assert plain["bits_per_value"] is None and 4 < ours["bits_per_value"] < 6
    assert "| DDP |" in said and "| ours, 4 bits, DDP |" in said and said.count("| yes |") == 2


def test_the_profile_is_of_two_steps_of_one_rank(trained):
    folder, _ = trained
    for name in ("ddp", "4bit-ddp"):
        with gzip.open(folder / f"curves-tiny-2-torchrun-{name}" / "profile.json.gz") as file:
            events = json.load(file)["traceEvents"]
        steps = {event["name"] for event in events if event["name"].startswith("ProfilerStep#")}
        assert len(steps) == 2
        assert any(event["name"] == "hvd_dyncomp.encode" for event in events) == (name == "4bit-ddp")


@pytest.mark.parametrize("name", ["tiny", "resnet8", "transformer"])
def test_each_step_has_a_new_batch_and_each_method_the_same(name):
    """A model of the same weights as well; and each rank has batches of its own."""

    def losses(rank: int) -> list[float]:
        workload = workloads.curve(name, 2, seed=3, rank=rank, device=CPU, autocast=False)
        found = []
        for _ in range(2):
            model, loss = workload()
            model.eval()
            with torch.no_grad():
                found += [loss(model).item() for _ in range(2)]
        return found

    first, second, again, once_more = losses(0)
    assert (first, second) == (again, once_more) and first != second
    assert losses(1)[0] != first


def test_autocast_computes_in_bfloat16():
    model, loss = workloads.curve("tiny", 2, seed=0, rank=0, device=CPU, autocast=True)()
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    loss(model).backward()
    assert seen == [torch.bfloat16] and model[1].weight.grad.dtype == torch.float32


def test_the_large_transformer_has_50_million_values():
    with torch.device("meta"):
        assert sum(p.numel() for p in workloads.build("transformer-50m").parameters()) == pytest.approx(50e6, rel=0.02)


def test_what_ranks_say_is_put_together():
    one = {"losses": [2.0, 1.0], "seconds": 0.1, "sent": 50.0, "peak": 7, "parameters": {"a": 1}}
    other = {"losses": [4.0, 3.0], "seconds": 0.2, "sent": 70.0, "peak": 9, "parameters": {"a": 2}}
    found = of_all([one, other], 120)
    assert found == {
        **{"losses": [3.0, 2.0], "steps_per_second": 5.0, "peak_bytes": [7, 9], "bits_per_value": 4.0},
        "replicas_equal": False,
    }
    results = {"model": "tiny", "workers": 2, "rate": "1gbit", "values": 1e6, "steps": 2, "batch_size": 4}
    shown = curves.report({**results, "autocast": True, "about": {"command": "x"}, "methods": {"4bit-ddp": found}})
    assert "| ours, 4 bits, DDP | 3.000 | 2.500 | 5.00 | 0.00 | 4.00 | no |" in shown and "bfloat16" in shown


@pytest.mark.parametrize(("flags", "least"), [((), 10), (("--profile",), 14)])
def test_too_few_steps_are_one_line(flags, least, capsys, tmp_path):
    place = ("--output-dir", str(tmp_path))
    assert not program.run(program.parse(["curves", "--steps", str(least), *flags, *place]))
    assert f"--steps {least}: more than {least} are needed" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_methods_of_horovod_are_refused(capsys):
    with pytest.raises(SystemExit):
        program.parse(["curves", "--methods", "none"])
    assert "--methods" in capsys.readouterr().err
