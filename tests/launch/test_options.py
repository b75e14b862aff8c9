"""Every bad command line is refused in one line that names the flag and its value."""

import pytest

from common.errors import RunError
from hvd_dyncomp import StepFunction
from train.options import compression_of, config, differences, make_policy, parse

BAD = [
    ("--model vgg16", ["--model", "'vgg16'"]),
    ("--epochs 0", ["--epochs", "0"]),
    ("--lr 0", ["--lr", "0"]),
    ("--compression zip", ["--compression", "'zip'"]),
    ("--compression dynamic --bits 4", ["--bits 4", "--compression dynamic"]),
    ("--policy schedule --schedule 0:4 --levels 4,8", ["--levels 4,8", "--policy step", "--policy schedule"]),
    ("--bits 4 --levels 4,8", ["--levels 4,8", "--compression static"]),
    ("--compression none --bits 4", ["--bits 4", "--compression none"]),
    ("--levels 4,9", ["--levels", "'9'"]),
    ("--levels 8,4,16", ["--levels", "'8,4,16'"]),
    ("--levels 4,8,32", ["--levels", "'4,8,32'"]),
    ("--levels 4,8", ["--thresholds 0.8,0.88", "--levels 4,8"]),
    ("--thresholds 0.9,0.8", ["--thresholds", "'0.9,0.8'"]),
    ("--thresholds 0.8", ["--thresholds 0.8", "--levels 4,8,16"]),
    ("--policy schedule", ["--policy schedule", "--schedule"]),
    ("--schedule 0:4", ["--schedule 0:4", "--policy step"]),
    ("--policy schedule --schedule 1:4", ["--schedule", "'1:4'"]),
    ("--policy schedule --schedule 0-4", ["--schedule", "'0-4'"]),
    ("--seed 99999999999999999999999", ["--seed", "99999999999999999999999"]),
    ("--output-dir=", ["--output-dir", "''"]),
    ("--compression static --bits ²", ["--bits", "'²'"]),
    ("--resume", ["--resume", "--output-dir"]),
    ("--epochs 3 --stop-after 4", ["--stop-after 4", "--epochs 3"]),
    ("--epoch 3", ["--epoch 3"]),
]


@pytest.mark.parametrize(("line", "named"), BAD, ids=[line for line, _ in BAD])
def test_bad_flags(line: str, named: list[str]) -> None:
    with pytest.raises(RunError) as caught:
        parse(line.split())
    said = str(caught.value)
    assert "\n" not in said and all(part in said for part in named), said


def test_the_first_line_says_whether_it_shows_the_papers_scheme() -> None:
    assert compression_of(parse([])).startswith("the paper's scheme, 4-8-16 bits by validation accuracy")
    assert compression_of(parse(["--bits", "0.25"])) == "compression static, 0.25 bits"
    assert compression_of(parse(["--compression", "none"])) == "compression none"


def test_bits_alone_are_a_constant_level() -> None:
    args = parse(["--bits", "0.25"])
    assert (args.compression, args.bits) == ("static", 0.25)
    assert parse(["--compression", "static"]).bits == 4


def test_defaults_are_the_papers_levels() -> None:
    args = parse([])
    assert (args.compression, args.policy, args.levels) == ("dynamic", "step", (4, 8, 16))
    assert len(args.thresholds) == 2
    assert args.stagnation == "plateau"


@pytest.mark.parametrize(
    "line",
    [
        "--policy schedule --schedule 0:32,2:4",
        "--levels 4 --thresholds=",
        "--levels 16,8,4",
        "--model resnet20 --stagnation none",
        "--resume --output-dir x",
    ],
)
def test_what_belongs_together_is_accepted(line: str) -> None:
    parse(line.split())


def test_flags_describe_a_policy() -> None:
    made = make_policy(parse(["--levels", "1,1/4", "--thresholds", "0.5", "--epochs", "9"]))
    assert made is not None and made.config() == StepFunction((1, 0.25), (0.5,), total_epochs=9).config()


def test_another_policy_is_another_run() -> None:
    here, there = (config(parse(f"--levels 1,{high} --thresholds 0.5".split())) for high in (4, 8))
    assert differences(here, there) == "levels [1, 4] (now [1, 8])"


def test_what_does_not_matter_is_left_out() -> None:
    here = config(parse(["--output-dir", "a", "--profile"]))
    assert here == config(parse(["--output-dir", "b", "--resume", "--tensorboard"]))
