"""The experiments with simulated workers: what the docs say of residuals; their command line."""

import pytest

from hvd_dyncomp import kernels
from hvd_dyncomp.kernels import reference
from studies import program, simulate_bound, simulate_placements, simulate_resize, simulate_storage


@pytest.mark.parametrize("course", simulate_resize.COURSES)
@pytest.mark.parametrize("bits", [1, 4])
def test_rescaling_residuals_loses_least(bits: int, course: str) -> None:
    errors = {
        rule: simulate_resize.error(simulate_resize.COURSES[course], rule, bits, steps=5, blocks=12, seed=3)
        for rule in simulate_resize.RULES
    }
    assert errors["rescale"] < min(errors["drop"], errors["keep"]), errors
    assert errors["rescale"] < errors["rescale own"] or course == "several", errors
    assert errors["rescale"] < errors["rescale near"] or course != "several", errors


def test_a_simulation_is_a_table(capsys) -> None:
    program.main(["--simulate", "resize", "--steps", "1", "--blocks", "12"])
    lines = capsys.readouterr().out.splitlines()
    rules = " | ".join(simulate_resize.RULES)
    assert lines[0] == f"| bits, one worker a host | {rules} |" and len(lines) == 2 * (6 + 1)


def test_a_placement_is_trained(capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulate_placements, "CANDIDATES", {"1 bit": simulate_placements.CANDIDATES["1 bit"]})
    monkeypatch.setattr(reference, "PLACEMENTS", dict(reference.PLACEMENTS))
    monkeypatch.setattr(kernels, "backends", dict(kernels.backends))
    monkeypatch.setattr(reference, "RESIDUAL_BOUND", reference.RESIDUAL_BOUND)
    program.main(
        ["--simulate", "placements", *["--dataset", "digits", "--limit-train", "128", "--epochs", "1", "--seeds", "1"]]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["placement", "---", "uncompressed", "1 bit"]


@pytest.mark.parametrize("bits", [2, 4])
def test_the_bound_costs_nothing_where_nothing_is_wrong(bits: int) -> None:
    found = {rule: simulate_bound.Sums(rule, "slow", 3, bits, 20, 4096, 0).error for rule in ("unbounded", "norm to 2")}
    assert found["norm to 2"] <= 1.02 * found["unbounded"], found


@pytest.mark.parametrize("bits", [1, 2, 4])
def test_the_bound_ends_a_disturbance(bits: int) -> None:
    first, *_, last = map(float, simulate_bound.recovery("norm to 2", 1, 2, bits, 4096, 0).split())
    assert first < 3 and last < 1.2 < 1000 < float(simulate_bound.recovery("unbounded", 1, 2, bits, 4096, 0).split()[0])


@pytest.mark.parametrize("bits", [1 / 4, 1 / 2, 4])
def test_small_gradients_survive_beside_large_residuals(bits: int) -> None:
    sizes = {"steps": 1500, "blocks": 2, "seed": 1}
    found = {name: simulate_storage.lost(one, bits, 0.01, **sizes) for name, one in simulate_storage.STORAGES.items()}
    assert found["bfloat16, at random"] <= found["float32"] + 0.02, found
    assert found["bfloat16, at random"] < 0.5 * found["bfloat16, to nearest"], found


@pytest.mark.parametrize("flags", ["--simulate weather", "--simulate resize --steps 0", "--simulate resize --epochs 3"])
def test_a_bad_flag_is_one_line(flags: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(flags.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and flags.split()[-1] in said
