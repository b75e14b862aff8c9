"""Every bad command line is refused in one line that names the flag and its value."""

import pytest

from common.errors import RunError
from hvd_dyncomp import CriticalRegime, Plateau, Policy, StepFunction
from train.options import compression_of, config, differences, make_policy, parse

BAD = [
    ("--model vgg16", ["--model", "'vgg16'"]),
    ("--epochs 0", ["--epochs", "0"]),
    ("--lr 0", ["--lr", "0"]),
    ("--momentum 1", ["--momentum", "1"]),
    ("--weight-decay=-1e-4", ["--weight-decay", "-1e-4"]),
    ("--warmup-epochs 9 --epochs 8", ["--warmup-epochs 9", "--epochs 8"]),
    ("--compression zip", ["--compression", "'zip'"]),
    ("--compression dynamic --bits 4", ["--bits 4", "--compression dynamic"]),
    ("--bits 4 --levels 4,8", ["--levels 4,8", "--compression static"]),
    ("--compression none --bits 4", ["--bits 4", "--compression none"]),
    ("--compression fp16 --block-size 64", ["--block-size 64", "--compression fp16"]),
    ("--compression none --no-error-feedback", ["--no-error-feedback", "--compression none"]),
    ("--levels 4,9", ["--levels", "'9'"]),
    ("--levels 8,4,16", ["--levels", "'8,4,16'"]),
    ("--levels 4,8,32", ["--levels", "'4,8,32'"]),
    ("--policy plateau --levels 8,4", ["--levels 8,4", "ascend", "--policy plateau"]),
    ("--policy plateau --thresholds 0.5", ["--thresholds 0.5", "--policy step", "--policy plateau"]),
    ("--patience 3", ["--patience 3", "--policy plateau", "--policy step"]),
    ("--policy critical", ["--policy critical", "--levels", "4,8,16"]),
    ("--policy critical --levels 4,16 --cooldown 2", ["--cooldown 2", "--policy step or plateau"]),
    ("--policy static --levels 4,8", ["--levels 4,8", "--policy step or plateau or critical"]),
    ("--level-warmup-bits 8", ["--level-warmup-bits 8", "--level-warmup-steps"]),
    ("--level-warmup-steps 5 --level-warmup-bits 9", ["--level-warmup-bits", "'9'"]),
    ("--levels 4,8", ["--thresholds 0.8,0.88", "--levels 4,8"]),
    ("--thresholds 0.9,0.8", ["--thresholds", "'0.9,0.8'"]),
    ("--thresholds 0.8", ["--thresholds 0.8", "--levels 4,8,16"]),
    ("--policy schedule", ["--policy schedule", "--schedule"]),
    ("--schedule 0:4", ["--schedule 0:4", "--policy step"]),
    ("--policy schedule --schedule 1:4", ["--schedule", "'1:4'"]),
    ("--policy schedule --schedule 0-4", ["--schedule", "'0-4'"]),
    ("--policy schedule --schedule 0:4 --cooldown 2", ["--cooldown 2", "--policy schedule"]),
    ("--seed 99999999999999999999999", ["--seed", "99999999999999999999999"]),
    ("--block-size 100", ["--block-size", "100"]),
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
        "--compression static --bits 8 --block-size 64",
        "--policy static --bits 3",
        "--compression static --hierarchical off",
        "--policy schedule --schedule 0:32,2:4",
        "--levels 4 --thresholds=",
        "--levels 16,8,4",
        "--policy plateau --levels 1/8,1/4,1/2,1 --monitor val_accuracy --patience 1 --cooldown 0 --min-improvement 0",
        "--policy critical --levels 1/8,1 --eta 0.3 --interval 2",
        "--level-warmup-steps 200 --level-warmup-bits 4",
        "--compression static --level-warmup-steps 200",
        "--model resnet20 --stagnation none",
        "--resume --output-dir x",
    ],
)
def test_what_belongs_together_is_accepted(line: str) -> None:
    parse(line.split())


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        (
            "--policy plateau --levels 1/4,1 --patience 3 --min-improvement 0.02 --cooldown 0",
            Plateau((0.25, 1), monitor="val_loss", patience=3, threshold=0.02),
        ),
        (
            "--policy plateau --levels 1/4,1 --monitor val_accuracy",
            Plateau((0.25, 1), monitor="val_accuracy", mode="max", patience=2, threshold=0.01, cooldown=3),
        ),
        ("--policy critical --levels 1/4,1 --eta 0.3 --interval 2", CriticalRegime(0.25, 1, eta=0.3, interval=2)),
        (
            "--levels 1,1/4 --thresholds 0.5 --epochs 9",
            StepFunction((1, 0.25), (0.5,), total_epochs=9),
        ),
    ],
)
def test_flags_describe_a_policy(line: str, policy: Policy) -> None:
    made = make_policy(parse(line.split()))
    assert made is not None and made.config() == policy.config()


def test_another_policy_is_another_run() -> None:
    here, there = (config(parse(f"--policy critical --levels 1,{high}".split())) for high in (4, 8))
    assert differences(here, there) == "levels [1, 4] (now [1, 8])"


def test_what_does_not_matter_is_left_out() -> None:
    here = config(parse(["--output-dir", "a", "--profile"]))
    assert here == config(parse(["--output-dir", "b", "--resume", "--tensorboard"]))
