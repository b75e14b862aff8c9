"""What test_bad_input.py calls, and with what: every public name, and for every argument what it must refuse."""

import io
import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import torch

from hvd_dyncomp import (
    AllRanks,
    Averager,
    Controller,
    CriticalRegime,
    Decision,
    DynamicQuantizer,
    Meter,
    Plateau,
    Policy,
    Record,
    Schedule,
    Static,
    StepFunction,
    Traffic,
    kernels,
    without_momentum,
)
from hvd_dyncomp.transport.in_process import World


class Call(NamedTuple):
    """Something public: how it is called, with arguments that it takes, and by argument what it must refuse."""

    function: Callable
    good: dict[str, Any]
    bad: dict[str, list]


class Says(Policy):
    """A policy that always says the same, whatever it is."""

    def __init__(self, answer, config=None):
        self.answer, self.plain = answer, {"policy": "Says"} if config is None else config

    def decide(self, history):
        return self.answer

    def config(self):
        return self.plain


class Unspeakable:
    """Has no text, and no value either."""

    def __repr__(self):
        raise RuntimeError("no text")

    shape = property(lambda self: 1 / 0)


UNPRINTABLE = 10**5000  # more digits than Python turns into text
WRONG = ["", "x", b"4", 1j, object(), Unspeakable(), {}, [], np.array([1, 2]), torch.zeros(2), math.nan]
NATURAL = [None, *WRONG, "3", 1.5, 3.0, math.inf, True, [3], -1, 10**30, UNPRINTABLE]  # no whole number of at least 0
COUNT = [*NATURAL, 0]
NOT_FINITE = [None, *WRONG, "0.5", True, [0.5], math.inf, -math.inf, np.float32("nan"), 10**400, UNPRINTABLE]
LEVEL = [None, *WRONG, "4", 0.3, -0.25, 4.5, float("nan"), True, 0, 9, 33, -4, np.int64(9), UNPRINTABLE, [4]]
SWITCH = [None, *WRONG, 0, 1, "True", np.True_]
CHOICE = [None, *WRONG, 3, ["nearest"], np.array("nearest")]
NO_SEQUENCE = [None, "48", "", b"\x04\x08", 4, math.nan, {4: 1, 8: 2}, {4, 8}, (b for b in (4, 8)), np.array(4)]
BAD_LADDER = [*NO_SEQUENCE, (), (8, 4), (4, 4), *([4, bits] for bits in LEVEL)]
HISTORY = [None, "x", 3, {}, {1, 2}, iter([]), [{}], [None], [Record(1), Record(0)], [Record(0), Record(0)]]


def history(*records: Any) -> dict[str, Any]:
    return {"bits": 4, "history": list(records), "config": {}}


QUANTIZER_STATE: dict[str, Any] = {
    "steps": 1,
    "rank": 0,
    "world_size": 2,
    "factor": 0.5,
    "meter": {"records": []},
    "auto_level": None,
    "hosts": [[0], [1]],
    "residuals": {"a": torch.zeros(3)},
    "shard_residuals": {"a": {"layout": 1, "first": 0, "carries": True, "values": torch.zeros(2)}},
}
SHARD = QUANTIZER_STATE["shard_residuals"]["a"]


def states(**values: list) -> list:
    """The state of a quantizer with one entry replaced, for each of the values."""
    return [{**QUANTIZER_STATE, key: value} for key, many in values.items() for value in many]


BAD_TENSORS = [None, 1, [0.0], torch.zeros(2).double(), torch.tensor([0.0, math.nan]), torch.tensor([math.inf])]
SHARDS = [
    *[{**SHARD, "values": value} for value in [*BAD_TENSORS, torch.zeros(2, 2)]],
    *[{**SHARD, key: value} for key in ("layout", "first") for value in (None, "x", -1, 1.5)],
    *[{key: value for key, value in SHARD.items() if key != missing} for missing in SHARD],
    {**SHARD, "carries": 1},
    None,
    5,
]
ROWS = [
    {},
    None,
    5,
    "x",
    {"epoch": 0},
    {"epoch": -1, "bits": 4},
    {"epoch": 0, "bits": 9},
    {"epoch": 0, "bits": 4, "x": 1},
]
ROWS += [{"epoch": 0, "bits": 4, key: value} for key in ("steps", "sent", "seconds") for value in (None, "x", -1)]
METERS = [None, 5, [], {}, {"tensors": []}]
METERS += [{"records": rows} for rows in (None, 5, [{"epoch": 0, "bits": 4}] * 2, *([row] for row in ROWS))]
MAPPINGS = [None, "x", 5, [], [1], {}, {"steps": 1}, math.nan]
STATES = (
    MAPPINGS
    + states(steps=NATURAL, world_size=COUNT, rank=[*NATURAL[1:], 2], factor=[*NOT_FINITE, 0, -1])
    + states(hosts=[5, "x", [0, 1], [[0], [0]], [[0]], [[0, 1], []], [[0], [2]], [[0], ["1"]]])
    + states(meter=METERS)
    + states(order=[5, "memory", [], True])
    + states(residuals=[None, 5, "x", *({"a": value} for value in BAD_TENSORS)])
    + states(shard_residuals=[None, 5, "x", *({"a": shard} for shard in SHARDS)])
    + [{k: v for k, v in QUANTIZER_STATE.items() if k not in ("auto_level", gone)} for gone in ("steps", "rank")]
    + states(spending=[5, "x", {}, {"units": [["a", 3]]}])
    + states(auto_level=[5, "x", {"floor": 4}, *({"floor": v, "chosen": 4, "since": 0} for v in LEVEL)])
    + states(auto_level=[{"floor": 4, "chosen": v, "since": 0} for v in LEVEL[1:]])
    + states(auto_level=[{"floor": 4, "chosen": 4, "since": v} for v in NATURAL])
)
WEIGHT = torch.zeros(1)
NAMED = [5, "ab", [1, 2], [("a", 1)], [("a", [1])], [(None, WEIGHT)], [(1, WEIGHT)], [], iter(()), {"ab": WEIGHT}]
NAMED += [[("a", WEIGHT), ("a", WEIGHT)], [torch.zeros(2)], [("a", WEIGHT, 1)]]
NO_TENSOR = [None, "x", 3, 0.5, [1.0], np.zeros(3), object()]

CONTROLLERS = [4.5, "Controller", Controller, [], Unspeakable()]
TRANSPORTS = [4, "mpi", [], object(), Unspeakable()]
[ALONE] = World(1).transports
QUANTIZER = {
    "controller": CONTROLLERS,
    "named_parameters": NAMED,
    "error_feedback": SWITCH,
    "rounding": CHOICE,
    "block_size": [*COUNT, 32, 96, 100, 2**17],
    "min_numel": COUNT,
    "skip": [4, "embedding", [], {}, b"x"],
    "fp16_skipped": SWITCH,
    "bucket_bytes": COUNT,
    "auto_level": SWITCH,
    "hierarchical": [True, *SWITCH[1:]],
    "discardable": SWITCH,
    "warmup_steps": NATURAL,
    "warmup_bits": LEVEL,
    "transport": TRANSPORTS,
}


def packed(state: Any) -> torch.Tensor:
    """As a rank's part of what `AllRanks.state_dict` returns; the same object, if nothing can write it."""
    file = io.BytesIO()
    try:
        torch.save(state, file)
    except Exception:  # noqa: BLE001  # whatever it is
        return state
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def averager(**arguments) -> Averager:
    return Averager(**{"named_parameters": [("a", WEIGHT)], "transport": ALONE, **arguments})


OUT = {"out": torch.zeros(36, dtype=torch.uint8)}
FORMAT = {"bits": 4, "block_size": 64}
VALUES = {"values": [torch.zeros(64)], "first": 0}
VERSIONS = {"versions": [torch.zeros(36, dtype=torch.uint8)]}
BAD_OUT = [*NO_TENSOR, torch.zeros(36), torch.zeros(35, dtype=torch.uint8), torch.zeros(72, dtype=torch.uint8)[::2]]
BAD_FORMAT = {
    "bits": [*LEVEL, 32],
    "block_size": [*COUNT, 32, 96, 64.0, 2**17],
}
BAD_VALUES = {
    "values": [None, "x", 3, torch.zeros(64), iter([torch.zeros(64)]), [np.zeros(64)], [torch.zeros(64).int()], [None]],
    "first": [*[value for value in NATURAL if value is not True], 2**62],
}
BAD_VERSIONS = {"versions": [None, "x", [], iter([OUT["out"]]), OUT["out"], [None], [torch.zeros(36)]]}
HALVES = torch.zeros(128, dtype=torch.bfloat16)
BAD_RESIDUAL = {"residual": [*NO_TENSOR[1:], HALVES[:63], torch.zeros(64), torch.zeros(64).half(), HALVES[::2]]}
BAD_DITHER = {"dither": [value for value in [*NATURAL, 2**32] if value is not True]}
NOISES = [(1, 2), (1.5, 2), (1,), (1, 2, 3), (-1, 2), (2**32, 2), 5, None]
BAD_NOISE = {"noise": [5, "x", (1, 2), kernels.Noise((1, 2), -1), kernels.Noise((1, 2), None)]}
BAD_NOISE["noise"] += [kernels.Noise(key) for key in NOISES[1:]]

TABLE = {
    "Static": Call(Static, {"bits": 4}, {"bits": LEVEL}),
    "Static.decide": Call(Static(4).decide, {"history": []}, {"history": HISTORY}),
    "Schedule": Call(
        Schedule,
        {"levels": {0: 4}},
        {
            "levels": [None, "x", 4, [(0, 4)], {}, {1: 4}, *({0: bits} for bits in LEVEL), {0: 4, -1: 8}]
            + [{0: 4, epoch: 8} for epoch in ("1", 1.5, None, 10**30, UNPRINTABLE, math.nan)]
        },
    ),
    "Schedule.decide": Call(Schedule({0: 4}).decide, {"history": []}, {"history": HISTORY}),
    "StepFunction": Call(
        StepFunction,
        {"levels": (4, 8), "thresholds": (0.5,)},
        {
            "levels": [*NO_SEQUENCE, (), (8, 4, 8), (4, 4), (4, 32), *([4, bits] for bits in LEVEL)],
            "thresholds": [*NO_SEQUENCE, (), (0.5, 0.6), *([value] for value in NOT_FINITE)],
            "monitor": [None, *WRONG[2:], "", "train_loss"],
            "loss": [*WRONG[2:], "", 3, "val_accuracy"],
            "min_improvement": [*NOT_FINITE, -0.1, 1, 2],
            "loss_patience": COUNT,
            "stagnation": CHOICE[1:],
            "stagnation_patience": NATURAL,
            "uncompressed_epochs": COUNT,
            "cooldown": NATURAL,
            "uncompressed_at_top": SWITCH,
            "total_epochs": COUNT[1:],
        },
    ),
    "Plateau": Call(
        Plateau,
        {},
        {
            "levels": BAD_LADDER,
            "monitor": [None, *WRONG[2:], "", 3],
            "mode": CHOICE,
            "patience": NATURAL,
            "threshold": [*NOT_FINITE, -0.1, 1, 2],
            "threshold_mode": CHOICE,
            "cooldown": NATURAL,
        },
    ),
    "Plateau.decide": Call(Plateau().decide, {"history": []}, {"history": HISTORY}),
    "CriticalRegime": Call(
        CriticalRegime,
        {"low": 4, "high": 8},
        {
            "low": LEVEL,
            "high": [*LEVEL, 4, 2],
            "monitor": [None, *WRONG[2:], "", 3],
            "eta": [*NOT_FINITE, -0.1],
            "interval": COUNT,
        },
    ),
    "CriticalRegime.decide": Call(CriticalRegime().decide, {"history": []}, {"history": HISTORY}),
    "StepFunction.decide": Call(StepFunction().decide, {"history": []}, {"history": HISTORY}),
    "Decision": Call(  # a plain tuple: the controller looks into it
        lambda bits, reason: Controller(Says(Decision(bits, reason))),
        {"bits": 4, "reason": "why"},
        {"bits": LEVEL, "reason": [None, 3, b"why", ["why"], Unspeakable()]},
    ),
    "Record": Call(
        Record,
        {"epoch": 0},
        {
            "epoch": NATURAL,
            "metrics": [None, "x", 3, [("a", 1)], {1: 2.0}, *({"a": v} for v in [None, "1", True, [1], UNPRINTABLE])],
            "bits": LEVEL,
            "reason": [None, 3, b"why"],
            "usable": SWITCH,
        },
    ),
    "Traffic": Call(
        Traffic,
        {},
        {field.name: [*NOT_FINITE, -1] if field.type == "float" else NATURAL for field in fields(Traffic)},
    ),
    "Meter": Call(Meter, {}, {}),
    "Meter.at": Call(Meter().at, {"epoch": 0, "bits": 4}, {"epoch": NATURAL, "bits": LEVEL}),
    "Meter.epoch": Call(Meter().epoch, {"epoch": 0}, {"epoch": NATURAL}),
    "Meter.level": Call(Meter().level, {"bits": 4}, {"bits": LEVEL}),
    "Meter.load_state_dict": Call(
        lambda state: Meter().load_state_dict(state),
        {"state": {"records": []}},
        {"state": METERS},
    ),
    "Controller": Call(
        Controller,
        {},
        {
            "policy": [4.5, "StepFunction", StepFunction, [], *(Says(x) for x in (None, 4, (4,), Decision(9, "")))]
            + [Says(Decision(4, ""), config) for config in ([], "x", {"a": np.zeros(2)}, {"a": {1}}, {1: 2, "a": 3})],
            "on_error": CHOICE,
            "nan_patience": COUNT,
            "check_replicas": SWITCH,
            "transport": TRANSPORTS,
        },
    ),
    "Controller.step": Call(
        lambda **arguments: Controller(Static(4)).step(**arguments),
        {"metrics": {"a": 1.0}},
        {
            "metrics": [None, "x", 3, [("a", 1)], {1: 2.0}, {"a": 1.0, None: 2}]
            + [{"a": value} for value in [None, "1", b"1", 1j, True, [1], torch.zeros(2), 10**400, Unspeakable()]],
            "epoch": NATURAL[1:],
            "num_samples": [*NOT_FINITE, -1, 0, torch.ones(2)],
        },
    ),
    "Controller.load_state_dict": Call(
        lambda state: Controller(Static(4)).load_state_dict(state),
        {"state": Controller(Static(4)).state_dict()},
        {
            "state": [*MAPPINGS, *({**history(), "bits": bits} for bits in LEVEL)]
            + [{**history(), "config": value} for value in (None, "x", [], {"a": np.zeros(2)})]
            + [{**history(), "history": value} for value in (None, 3, "x", {"a": 1}, [{}], [None], [[]])]
            + [history({"epoch": epoch, "bits": 4}) for epoch in NATURAL]
            + [history({"epoch": 0, "bits": 4}, {"epoch": 0, "bits": 4}), history({"epoch": 0, "bits": 8})],
        },
    ),
    "DynamicQuantizer": Call(DynamicQuantizer, {}, QUANTIZER),
    "Averager": Call(averager, {}, QUANTIZER),
    "AllRanks": Call(
        AllRanks,
        {"quantizer": DynamicQuantizer()},
        {"quantizer": [None, 4, Controller(), Averager, WEIGHT, Unspeakable()]},
    ),
    "AllRanks.load_state_dict": Call(
        lambda state: AllRanks(averager(named_parameters=[("a", torch.zeros(3))])).load_state_dict(state),
        {"state": {"ranks": [packed(QUANTIZER_STATE)], "controller": Controller(Static(4)).state_dict()}},
        {
            "state": [*MAPPINGS, {"ranks": [packed(QUANTIZER_STATE)], "controller": {}}]
            + [
                {"ranks": ranks, "controller": Controller(Static(4)).state_dict()}
                for ranks in [None, [], 4, "x", [None], [WEIGHT], [packed(3)], [packed({})], packed(QUANTIZER_STATE)]
                + [[packed(state)] for state in STATES]
                + [[packed(QUANTIZER_STATE), one] for one in (None, WEIGHT, packed({}), packed({"residuals": 3}))]
            ]
        },
    ),
    "Averager.load_state_dict": Call(
        lambda state: averager(named_parameters=[("a", torch.zeros(3))], auto_level=True).load_state_dict(state),
        {"state": QUANTIZER_STATE},
        {"state": STATES},
    ),
    "Averager.mean_": Call(
        lambda tensors: averager().mean_(tensors),
        {"tensors": [WEIGHT.clone()]},
        {
            "tensors": [None, 4, "a", [], [WEIGHT, WEIGHT], WEIGHT, {0: WEIGHT}, iter([WEIGHT])]
            + [
                [value]
                for value in [3, "x", np.zeros(1), torch.zeros(2), torch.zeros(1).int(), torch.zeros(1).cfloat()]
            ]
        },
    ),
    "without_momentum": Call(
        without_momentum,
        {"optimizer": torch.optim.SGD([WEIGHT.clone()], lr=0.1)},
        {"optimizer": [None, 4, "SGD", torch.optim.SGD, torch.optim.NAdam([WEIGHT.clone()]), WEIGHT, Unspeakable()]},
    ),
    "DynamicQuantizer.attach": Call(
        lambda optimizer: None if optimizer is None else DynamicQuantizer().attach(optimizer),
        {"optimizer": None},
        {"optimizer": [4, "x", object(), WEIGHT, torch.optim.SGD([WEIGHT.clone()], lr=0.1), Unspeakable()]},
    ),
    "DynamicQuantizer.compress": Call(
        lambda tensor: DynamicQuantizer().compress(tensor), {"tensor": WEIGHT}, {"tensor": NO_TENSOR}
    ),
    "DynamicQuantizer.decompress": Call(
        lambda tensor, ctx: DynamicQuantizer().decompress(tensor, ctx),
        {"tensor": WEIGHT, "ctx": None},
        {"tensor": NO_TENSOR, "ctx": ["x", 3, (WEIGHT, None, False), WEIGHT]},
    ),
    "DynamicQuantizer.load_state_dict": Call(
        lambda state: DynamicQuantizer(auto_level=True).load_state_dict(state),
        {"state": QUANTIZER_STATE},
        {
            "state": STATES,
        },
    ),
    "kernels.encode_into": Call(
        kernels.encode_into,
        {**OUT, **VALUES, "residual": None, **FORMAT, "noise": kernels.Noise((1, 2), 3), "dither": 4},
        {"out": BAD_OUT, **BAD_VALUES, **BAD_RESIDUAL, **BAD_FORMAT, **BAD_NOISE, **BAD_DITHER},
    ),
    "kernels.decode_into": Call(
        kernels.decode_into,
        {**VALUES, **VERSIONS, **FORMAT, "factor": 0.5},
        {**BAD_VALUES, **BAD_VERSIONS, **BAD_FORMAT, "factor": [None, "x", [1], math.nan, math.inf, UNPRINTABLE]},
    ),
    "kernels.reduce_into": Call(
        kernels.reduce_into,
        {**OUT, **VERSIONS, "residual": None, **FORMAT, "real": 100, "noise": None, "dither": 0},
        {
            "out": BAD_OUT,
            **BAD_VERSIONS,
            **BAD_RESIDUAL,
            **BAD_FORMAT,
            "real": [-1, 1.5, "x", True, 2**62, UNPRINTABLE],
            **BAD_NOISE,
            **BAD_DITHER,
        },
    ),
}
