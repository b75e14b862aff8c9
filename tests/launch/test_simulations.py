"""The experiments with simulated workers: what docs/design.md says about residuals, and their command line."""

import pytest

from hvd_dyncomp.kernels import reference
from studies import program, simulate_placements, simulate_resize


@pytest.mark.parametrize("bits", [1, 4])
def test_rescaling_residuals_loses_least(bits: int) -> None:
    errors = {rule: simulate_resize.error(rule, bits, steps=5, blocks=12, seed=3) for rule in simulate_resize.RULES}
    assert errors["rescale"] < errors["rescale own"] < min(errors["drop"], errors["keep"]), errors


def test_a_simulation_is_a_table(capsys) -> None:
    program.main(["--simulate", "resize", "--steps", "1", "--blocks", "12"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| bits | drop | keep | rescale own | rescale |" and len(lines) == 6


def test_a_placement_is_trained(capsys, monkeypatch) -> None:
    monkeypatch.setattr(simulate_placements, "CANDIDATES", {"1 bit": simulate_placements.CANDIDATES["1 bit"]})
    monkeypatch.setattr(reference, "PLACEMENTS", dict(reference.PLACEMENTS))
    program.main(
        ["--simulate", "placements", *["--dataset", "digits", "--limit-train", "128", "--epochs", "1", "--seeds", "1"]]
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("|")[1].strip() for line in lines] == ["placement", "---", "uncompressed", "1 bit"]


@pytest.mark.parametrize("flags", ["--simulate weather", "--simulate resize --steps 0", "--simulate resize --epochs 3"])
def test_a_bad_flag_is_one_line(flags: str, capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(flags.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.count("\n") == 1 and flags.split()[-1] in said
