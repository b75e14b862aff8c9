"""What every public argument, and every entry of a state, may be; test_bad_input.py passes all else, to be refused."""

import io
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from decimal import Decimal
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD, RMSprop

import hvd_dyncomp as library
from hvd_dyncomp import LEVELS, Averager, Controller, Decision, DynamicQuantizer, Policy, Record, Traffic, kernels
from hvd_dyncomp.simulate import World


class Unspeakable:
    """Has no text and no shape, and can be neither copied nor asked."""

    def fail(self, *_):
        raise LookupError("no")

    __repr__ = __deepcopy__ = __bool__ = __eq__ = fail
    __hash__ = None
    shape = property(fail)


class Says(Policy):
    """A policy that always says the same, whatever it is."""

    def __init__(self, answer, config=None):
        self.answer, self.plain = answer, {"policy": "Says"} if config is None else config

    def decide(self, history):
        return self.answer

    def config(self):
        return self.plain


def everything() -> list[Any]:
    """Values of every type, many on the edge of a range."""
    deep: list = []
    for _ in range(5_000):
        deep = [deep]
    numbers = [0, 1, 2, -1, 3, 9, 32, 33, 96, 2**17, 2**32, 2**62, 10**30, 10**400, 10**5000, np.int64(9), True, False]
    numbers += [0.0, 0.3, -0.25, 1.5, 3.0, 4.5, -1e-9, math.nan, math.inf, -math.inf, np.float32("nan"), 1j, np.True_]
    numbers += [Decimal("0.5"), Fraction(1, 3), np.array(4), np.array([[0.3]]), torch.tensor(1.0), torch.zeros(1).int()]
    texts = ["", "x", "3", "0.5", "\u0663", "True", "nan", "memory", b"", b"4", b"\x04\x08", bytearray(b"4")]
    holders = [[], ["x"], [[]], [None], (), (None,), {}, {5: 6}, {4}, iter([3]), (x for x in (4, 8)), deep]
    arrays = [np.zeros(2), np.array(["a"]), torch.zeros(2), torch.zeros(1), torch.zeros(0), torch.zeros(2, 3)]
    arrays += [torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.complex64), torch.zeros(3).double()]
    arrays += [torch.tensor([0.0, math.nan]), torch.tensor([math.inf]), torch.eye(3).to_sparse()]
    return numbers + texts + holders + arrays + [None, object(), Unspeakable(), Controller, Record(0), SGD]


Takes = Callable[[Any], bool]


def number(value: Any) -> float | None:
    """The value of a number, or of an array of one."""
    try:
        plain = value.item() if math.prod(getattr(value, "shape", (0,))) == 1 else value
        return float(plain) if isinstance(plain, Real) and not isinstance(plain, bool) else None
    except (LookupError, OverflowError):
        return None


def real(fits: Callable[[float], bool] = math.isfinite) -> Takes:
    return lambda value: (x := number(value)) is not None and fits(x)


def whole(least: int = 0, most: int = 2**63 - 1) -> Takes:
    return lambda value: isinstance(value, Integral) and not isinstance(value, bool) and least <= value <= most


def level(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and value in LEVELS


def word(below: int) -> Takes:
    """For kernels, which are called too often to look twice: True passes for 1."""
    return lambda value: isinstance(value, int) and 0 <= value < below


def a(*types: type) -> Takes:
    return lambda value: isinstance(value, types)


def none_or(takes: Takes) -> Takes:
    return lambda value: value is None or takes(value)


def empty(value: Any) -> bool:
    return hasattr(value, "__len__") and getattr(value, "shape", 1) != () and len(value) == 0


def floats(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return dense and value.dtype == torch.float32


def residuals(value: Any) -> bool:
    dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_meta
    return dense and value.dtype == torch.bfloat16 and bool(value.isfinite().all())


def packed(state: Any) -> Tensor:
    """As a rank's part of what `AllRanks.state_dict` returns."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


# By name, what it may be: of lists and dicts the whole, where its parts are in `PARTS`. "X.name" is that of X only.
TYPES: list[tuple[Takes, str]] = [
    (lambda v: False, "mode threshold_mode on_error levels StepFunction.levels Schedule.levels state meter"),
    (lambda v: False, "rank0 record epochs host pair ranks packed optimizer quantizer out versions version slot"),
    (lambda v: False, "slot.order"),
    (lambda v: v is None, "transport ctx residual hosts stagnation"),
    (lambda v: v is None, "attach.optimizer named_parameters"),
    (lambda v: isinstance(v, str) and v == "logical", "order"),
    (none_or(callable), "skip"),
    (empty, "metrics history residuals shard_residuals shard records decide.history slots"),
    (
        whole(),
        "patience cooldown stagnation_patience warmup_steps epoch steps",
    ),
    (whole(), "shard.first slot.start"),
    (whole(0, 0), "dimension"),
    (whole(1), "loss_patience uncompressed_epochs interval nan_patience min_numel"),
    (none_or(whole(1)), "bucket_bytes PerRank.ranks"),
    (whole(2, 2), "world_size"),
    (whole(0, 1), "index"),
    (lambda v: whole(64, 2**16)(v) and int(v).bit_count() == 1, "block_size"),
    (none_or(whole()), "step.epoch"),
    (none_or(whole(1)), "total_epochs"),
    (none_or(whole(0, 1)), "rank"),
    (word(2**62), "first"),
    (word(2**32), "dither"),
    (none_or(lambda v: v is not True and word(2**62)(v)), "real"),
    (lambda v: type(v) is int and v in kernels.BLOCK_SIZES, "kernels.block_size"),
    (level, "bits warmup_bits floor"),
    (none_or(level), "chosen policy controller"),
    (lambda v: level(v) and v < 8, "low"),
    (lambda v: level(v) and v > 4, "high"),
    (lambda v: level(v) and v < 32 and type(v) is (int if v >= 1 else float), "kernels.bits"),
    (real(), "threshold_of_level kernels.factor"),
    (real(lambda x: True), "metric"),
    (real(lambda x: 0 <= x < 1), "threshold min_improvement"),
    (real(lambda x: 0 < x < 1), "most"),
    (real(lambda x: 0 <= x < math.inf), " ".join(one.name for one in fields(Traffic) if one.type == "float")),
    (real(lambda x: 0 <= x < math.inf), "num_samples eta"),
    (a(bool), "error_feedback check_replicas uncompressed_at_top usable carries"),
    (lambda v: v is None or v is False, "hierarchical"),
    (a(str), "reason"),
    (lambda v: a(str)(v) and v != "", "monitor StepFunction.monitor"),
    (none_or(lambda v: a(str)(v) and v != ""), "loss"),
    (a(dict), "config"),
    (a(list, tuple), "values"),
    (lambda v: a(list, tuple)(v) and len(v) == 1 and v[0] is None, "tensors"),
    (a(np.ndarray, Tensor), "thresholds"),
    (a(Record), "record_of_epoch"),
    (a(Tensor), "tensor"),
    (a(Tensor, str), "name_or_weight"),
    (floats, "values_of_tensor"),
    (residuals, "residual_of_tensor"),
    (lambda v: residuals(v) and v.dim() == 1, "shard.values"),
    (none_or(lambda v: a(Tensor)(v) and v.shape == (3,) and v.is_floating_point()), "mean"),
]
MAY = {name: takes for takes, names in TYPES for name in names.split()}
# What is in lists, and in dicts whose keys are free.
PARTS = {"levels": "bits", "Schedule.levels": "bits", "StepFunction.levels": "bits", "thresholds": "threshold_of_level"}
PARTS |= {"metrics": "metric", "decide.history": "record_of_epoch", "history": "epochs", "records": "record"}
PARTS |= {"hosts": "host", "host": "index", "residuals": "residual_of_tensor", "shard_residuals": "shard"}
PARTS |= {"slots": "slot", "slot.order": "dimension"}
PARTS |= {"named_parameters": "pair", "pair": "name_or_weight", "tensors": "mean", "ranks": "packed"}
PARTS |= {"values": "values_of_tensor", "versions": "version"}
OPTIONAL = {"hosts", "steps", "seconds", "metrics", "reason", "usable"}

WEIGHT = torch.zeros(3)
METER = {"records": [{"epoch": 0, "bits": 4, "steps": 1, "seconds": 0.5}]}
SHARD = {"first": 2, "carries": True, "values": torch.ones(2).bfloat16(), "slots": {"a": {"start": 0, "order": [0]}}}
STATE = {"steps": 3, "rank": 0, "world_size": 2, "hosts": [[0], [1]], "order": "logical"}
STATE |= {"meter": METER}
STATE |= {"residuals": {"a": torch.ones(3).bfloat16()}, "shard_residuals": {"bucket": SHARD}}
EPOCH = {"epoch": 0, "bits": 4, "metrics": {"a": 1.0}, "reason": "", "usable": True}
DECIDED = {"bits": 4, "history": [EPOCH], "config": {}}
MEASURED = dict.fromkeys(("val_accuracy", "train_loss", "val_loss", "gradient_norm", "waited"), 0.5)
RECORDS = [Record(0, MEASURED), Record(1, MEASURED)]
BYTES, VALUES, HALVES = torch.zeros(34, dtype=torch.uint8), torch.zeros(64), torch.zeros(128, dtype=torch.bfloat16)

# Passed while others are bad; what is in it is replaced, too.
GOOD = {"bits": 4, "low": 4, "high": 8, "levels": (4, 8), "Schedule.levels": {0: 4}, "thresholds": (0.5,), "epoch": 0}
GOOD |= {"metrics": {"a": 1.0}, "decide.history": RECORDS, "reason": "why", "named_parameters": [("a", WEIGHT)]}
GOOD |= {"state": STATE, "Meter.state": METER, "Controller.state": DECIDED, "tensors": [WEIGHT], "tensor": WEIGHT}
RANK = {"ranks": 1, "quantizer": packed(STATE), "controller": DECIDED}
GOOD |= {"PerRank.state": {"rank0": packed(RANK).numpy().tobytes()}}
GOOD |= {"AllRanks.state": {"ranks": [packed(STATE)], "controller": DECIDED}, "quantizer": DynamicQuantizer()}
GOOD |= {"optimizer": SGD([WEIGHT], 0.1), "attach.optimizer": None, "out": BYTES, "values": [VALUES]}
GOOD |= {"versions": [BYTES], "block_size": 64}

# Bad for more than a type or a range.
ALSO: dict[str, list] = {
    "levels": [(), (8, 4), (4, 4)],
    "StepFunction.levels": [(), (8, 4, 8), (4, 4), (4, 32)],
    "Schedule.levels": [{}, {1: 4}, {0.0: 4}, *({0: 4, key: 8} for key in (-1, "1", 1.5, None, 10**30, math.nan))],
    "thresholds": [(), (0.5, 0.6)],
    "StepFunction.monitor": ["train_loss"],
    "loss": ["val_accuracy"],
    "num_samples": [0],
    "metrics": [{1: 2.0}, {"a": 1.0, None: 2}],
    "decide.history": [RECORDS[::-1], RECORDS[:1] * 2],
    "history": [[EPOCH] * 2, [{**EPOCH, "bits": 8}]],
    "records": [[{"epoch": 0, "bits": 4}] * 2, [{"epoch": 0, "bits": 4, "x": 1}]],
    "policy": [Says(None), Says(4), Says((4,)), Says((9, "")), Says((4, ""), []), Says((4, ""), {"a": {1}})],
    "hosts": [[[0], [0]], [[0]], [[0, 1], []], [[0], [2]]],
    "ranks": [[packed(state)] for state in (3, {}, *({**STATE, key: "x"} for key in STATE))],
    "named_parameters": [[("a", WEIGHT)] * 2, {"ab": WEIGHT}, [("a", WEIGHT, 1)], [(None, WEIGHT)], [("a", [1])]],
    "tensors": [[WEIGHT, WEIGHT], WEIGHT, {0: WEIGHT}, iter([WEIGHT])],
    "optimizer": [RMSprop([WEIGHT]), WEIGHT],
    "attach.optimizer": [SGD([WEIGHT], 0.1)],
    "ctx": [(WEIGHT, None, False)],
    "out": [torch.zeros(34), BYTES[:33], torch.zeros(68, dtype=torch.uint8)[::2]],
    "values": [VALUES, iter([VALUES]), [VALUES, VALUES[::2]]],
    "versions": [BYTES, iter([BYTES]), [BYTES, torch.cat([BYTES, BYTES])]],
    "residual": [HALVES[:63], VALUES, VALUES.half(), HALVES[::2]],
}


def averager(**arguments: Any) -> Averager:
    return Averager(**{"named_parameters": [("a", WEIGHT)], "transport": World(1).transports[0], **arguments})


# What has the methods; and what is not called by its name.
OWNERS: dict[str, Callable] = {
    **{"Static": lambda: library.Static(4), "Schedule": lambda: library.Schedule({0: 4}), "kernels": lambda: kernels},
    "Controller": lambda: Controller(4),
    "CriticalRegime": lambda: library.CriticalRegime(low=4, high=8),
    "DynamicQuantizer": DynamicQuantizer,
    "Averager": averager,
    "AllRanks": lambda: library.AllRanks(averager()),
    "PerRank": lambda: library.PerRank(averager()),
}
CALLED = {"Averager": averager, "Decision": lambda bits, reason: Controller(Says(Decision(bits, reason)))}


def known(names: dict[str, Any], name: str, owners: Sequence[str]) -> str:
    """Under what the table has `name`."""
    return next((key for key in (*(f"{owner}.{name}" for owner in owners), name) if key in names), "")


def spoiled(name: str, owners: Sequence[str], good: Any, values: Sequence[Any]) -> Iterator[Any]:
    """What must be refused in place of `good`: bad ones of the values, and itself with parts that are bad or gone."""
    key = known(MAY, name, owners)
    yield from (value for value in values if not MAY[key](value))
    yield from ALSO.get(key, ())
    for place in good if isinstance(good, dict) else range(len(good)) if isinstance(good, (list, tuple)) else ():
        for bad in spoiled(PARTS.get(key) or place, (name, *owners), good[place], values):
            yield {**good, place: bad} if isinstance(good, dict) else [*good[:place], bad, *good[place + 1 :]]
        if key not in PARTS and place not in OPTIONAL:
            yield {other: good[other] for other in good if other != place}
