"""Every bad command line ends with status 2 and one line that names the flag and its value."""

import pytest

from training.course import course, differences
from training.options import parse

BAD = [
    ("--model vgg16", ["--model", "'vgg16'"]),
    ("--model resnet10", ["--model", "'resnet10'"]),
    ("--depth 9", ["--depth 9"]),
    ("--depth 20 --model resnet20", ["--depth 20", "--model resnet20"]),
    ("--model resnet18 --shortcut B", ["--shortcut B", "resnet18"]),
    ("--dataset mnist", ["--dataset", "'mnist'"]),
    ("--epochs 0", ["--epochs", "0"]),
    ("--epochs many", ["--epochs", "'many'"]),
    ("--batch-size -1", ["--batch-size", "-1"]),
    ("--lr 0", ["--lr", "0"]),
    ("--lr nan", ["--lr", "'nan'"]),
    ("--momentum 1", ["--momentum", "1"]),
    ("--weight-decay=-1e-4", ["--weight-decay", "-1e-4"]),
    ("--warmup-epochs 9 --epochs 8", ["--warmup-epochs 9", "--epochs 8"]),
    ("--seed -1", ["--seed", "-1"]),
    ("--val-size -5", ["--val-size", "-5"]),
    ("--compression zip", ["--compression", "'zip'"]),
    ("--compression static --bits 9", ["--bits", "'9'"]),
    ("--bits 4", ["--bits 4", "--compression dynamic"]),
    ("--compression none --bits 4", ["--bits 4", "--compression none"]),
    ("--compression none --levels 1,2 --thresholds 0.5", ["--levels 1,2", "--compression none"]),
    ("--compression fp16 --rounding stochastic", ["--rounding stochastic", "--compression fp16"]),
    ("--compression none --no-error-feedback", ["--no-error-feedback", "--compression none"]),
    ("--hierarchical yes", ["--hierarchical", "'yes'"]),
    ("--compression none --hierarchical on", ["--hierarchical on", "--compression none"]),
    ("--compression static --policy step", ["--policy step", "--compression static"]),
    ("--levels 4,9", ["--levels", "'9'"]),
    ("--levels 8,4,16", ["--levels", "'8,4,16'"]),
    ("--levels 4,8,32", ["--levels", "'4,8,32'"]),
    ("--levels 4,8", ["--thresholds 0.8,0.88", "--levels 4,8"]),
    ("--thresholds 0.9,0.8", ["--thresholds", "'0.9,0.8'"]),
    ("--thresholds 80,90", ["--thresholds", "'80,90'"]),
    ("--thresholds 0.8", ["--thresholds 0.8", "--levels 4,8,16"]),
    ("--stagnation never", ["--stagnation", "'never'"]),
    ("--release-epochs 0", ["--release-epochs", "0"]),
    ("--policy schedule", ["--policy schedule", "--schedule"]),
    ("--schedule 0:4", ["--schedule 0:4", "--policy step"]),
    ("--policy schedule --schedule 1:4", ["--schedule", "'1:4'"]),
    ("--policy schedule --schedule 0:4,0:8", ["--schedule", "'0:4,0:8'"]),
    ("--policy schedule --schedule 0-4", ["--schedule", "'0-4'"]),
    ("--policy schedule --schedule 0:4 --cooldown 2", ["--cooldown 2", "--policy schedule"]),
    ("--seed 99999999999999999999999", ["--seed", "99999999999999999999999"]),
    ("--block-size 100", ["--block-size", "100"]),
    ("--block-size 131072", ["--block-size", "131072"]),
    ("--output-dir=", ["--output-dir", "''"]),
    ("--data-dir=", ["--data-dir", "''"]),
    ("--compression static --bits ²", ["--bits", "'²'"]),
    ("--resume", ["--resume", "--output-dir"]),
    ("--epochs 3 --stop-after 4", ["--stop-after 4", "--epochs 3"]),
    ("--epoch 3", ["--epoch 3"]),
]


@pytest.mark.parametrize(("line", "named"), BAD, ids=[line for line, _ in BAD])
def test_bad_flags(line: str, named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(line.split())
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert all(part in said[0] for part in named), said[0]


def test_defaults_are_the_papers_ladder() -> None:
    args = parse([])
    assert (args.compression, args.policy, args.levels) == ("dynamic", "step", (4, 8, 16))
    assert len(args.thresholds) == 2
    assert args.stagnation == "time"


@pytest.mark.parametrize(
    "line",
    [
        "--compression static --bits 8 --rounding stochastic",
        "--policy static --bits 3",
        "--compression static --hierarchical off",
        "--policy schedule --schedule 0:32,2:4",
        "--levels 4 --thresholds=",
        "--depth 20 --shortcut B --stagnation none",
        "--resume --output-dir x",
    ],
)
def test_what_belongs_together_is_accepted(line: str) -> None:
    parse(line.split())


def test_depth_is_folded_into_model() -> None:
    assert parse(["--depth", "20"]).model == "resnet20"
    assert parse(["--model", "resnet20"]).model == "resnet20"


def test_help_names_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("model and data", "training:", "gradient compression:", "the step policy", "run:", "default: 4,8,16"):
        assert part in text


def test_course_leaves_out_what_does_not_matter() -> None:
    first = course(parse(["--output-dir", "a", "--seed", "1"]), "digits", 2)
    again = course(parse(["--output-dir", "b", "--seed", "1", "--resume"]), "digits", 2)
    assert differences(first, again) == ""
    other = course(parse(["--seed", "2"]), "digits", 3)
    assert differences(first, other) == "seed 1 (now 2), world_size 2 (now 3)"
