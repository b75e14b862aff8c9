"""Runs PTX of one warp without a GPU: what the compiler has made of a kernel, one instruction after the other in numpy.

Only what the Triton kernels compile to at the default block size: 32 lanes that branch together, registers, memory and
shuffles; no barriers but those of the warp, which is always in step. What is not known here is an error. Numbers are
IEEE, rounded to nearest, which is what the instructions say.
"""

import ctypes
import re
from collections.abc import Callable, Sequence

import numpy as np
import torch

LANES = 32
Lanes = np.ndarray  # (LANES,)
TYPES = {
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    "f32": np.dtype("f4"),
    "f64": np.dtype("f8"),
    "pred": np.dtype("u1"),
}
UNKNOWN = np.full(LANES, 0xA5A5A5A5A5A5A5A5, "u8")  # in registers that nobody has written: some are read, for nothing
SHARED = 2**14  # bytes of shared memory
CELLS = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}
ORDERED: dict[str, Callable] = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
SETP: dict[str, Callable] = {
    **ORDERED,
    "eq": np.equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "neu": lambda a, b: ~(a == b),
    "num": lambda a, b: (a == a) & (b == b),
    **{
        f"{name}u": lambda a, b, ordered=ordered: ordered(a, b) | (a != a) | (b != b)
        for name, ordered in ORDERED.items()
    },
}
BOTH: dict[str, Callable] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mul.lo": np.multiply,
    "div": np.divide,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "max": np.maximum,
    "min": np.minimum,
}


class Warp:
    """One warp at work on one program of the grid.

    Args:
        parameters: of the kernel, as raw bits.
        program: `%ctaid.x`.
    """

    def __init__(self, parameters: Sequence[int], program: int) -> None:
        self.parameters = parameters
        self.special = {"%tid.x": np.arange(LANES, dtype="u8"), "%ctaid.x": np.full(LANES, program, "u8")}
        self.registers: dict[str, Lanes] = {}
        self.shared = np.full(SHARED, 0xA5, "u1")

    def get(self, name: str, kind: str) -> Lanes:
        """What a register holds, or an immediate number is, as one of TYPES."""
        to = TYPES[kind]
        if name[0] == "%":
            bits = self.special[name] if name in self.special else self.registers.get(name, UNKNOWN)
            return bits.astype(f"u{to.itemsize}").view(to)
        if name == "global_smem":
            name = "0"
        if name[:2] in ("0f", "0d"):
            return np.full(LANES, int(name[2:], 16), f"u{to.itemsize}").view(to)
        return np.full(LANES, int(name.rstrip("U"), 0) & (1 << 8 * to.itemsize) - 1, f"u{to.itemsize}").view(to)

    def set(self, name: str, values: Lanes, where: Lanes) -> None:
        """Writes a register, in some lanes; the upper bits become zero."""
        bits = np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}").astype("u8")
        self.registers[name] = np.where(where, bits, self.registers.get(name, UNKNOWN))

    def address(self, operand: str) -> Lanes:
        base, _, offset = operand.strip("[]").replace(" ", "").partition("+")
        return self.get(base, "u64") + np.uint64(int(offset or "0", 0))

    def execute(self, operation: str, operands: list[str], where: Lanes) -> None:
        """One instruction but branches, in the lanes `where`."""
        *words, kind = operation.split(".")
        name = ".".join(word for word in words if word not in ("rn", "sync", "global", "shared", "param", "v2", "v4"))
        target = operands[0]
        if name in BOTH:
            a, b = (self.get(operand, kind) for operand in operands[1:])
            if kind[0] == "f" and name in ("max", "min"):  # of a number and a NaN, the number
                result = (np.fmax if name == "max" else np.fmin)(a, b)
            else:
                result = BOTH[name](a, b)
        elif name == "ld" and "param" in words:
            number = self.parameters[int(re.search(r"_param_(\d+)", operands[1])[1])]
            result = np.full(LANES, number & 2**64 - 1, "u8").astype(f"u{TYPES[kind].itemsize}").view(TYPES[kind])
            if target.startswith("%rd") and kind == "s32":
                result = result.astype("i8")
        elif name in ("ld", "st"):
            return self.memory(name, words, operands, kind, where)
        elif name == "shfl.bfly" or name == "shfl.idx":
            lanes = np.arange(LANES)
            at = lanes ^ int(operands[2], 0) if name == "shfl.bfly" else self.get(operands[2], "u32") % LANES
            result = self.get(operands[1], kind)[at]
        elif name == "redux.max":
            result = np.full(LANES, self.get(operands[1], kind).max())
        elif words[0] == "cvt":
            result = self.converted(operands[1], *[word for word in [*words, kind] if word in TYPES], "rzi" in words)
        elif words[0] == "setp":
            result = SETP[words[1]](self.get(operands[1], kind), self.get(operands[2], kind)).astype("u1")
        elif name == "selp":
            result = np.where(self.get(operands[3], "pred"), *(self.get(operand, kind) for operand in operands[1:3]))
        elif operation == "bar.warp.sync":
            return
        elif name == "mov":
            return self.moved(target, operands[1], kind, where)
        else:
            result = self.computed(name, [*operands[1:]], kind)
        self.set(target, result, where)

    def memory(self, name: str, words: list[str], operands: list[str], kind: str, where: Lanes) -> None:
        """Loads or stores a register, or several one after the other."""
        at, registers = operands if name == "st" else operands[::-1]
        cell, first = CELLS[TYPES[kind].itemsize], self.address(at)
        for i, register in enumerate(registers.split(",")):
            values = self.get(register.strip(), kind).copy()
            for lane in np.flatnonzero(where):
                place = int(first[lane]) + i * values.itemsize
                found = cell.from_buffer(self.shared, place) if "shared" in words else cell.from_address(place)
                if name == "ld":
                    values[lane] = found.value
                else:
                    found.value = int(values[lane])
            if name == "ld":
                self.set(register.strip(), values, where)

    def computed(self, name: str, operands: list[str], kind: str) -> Lanes:
        """The rest of what has one result."""
        wide = f"{kind[0]}{2 * 8 * TYPES[kind].itemsize}" if TYPES[kind].itemsize < 8 else kind
        a = self.get(operands[0], kind)
        if name in ("shl", "shr"):
            by = self.get(operands[1], "u32")
            size = 8 * a.dtype.itemsize
            inside = np.minimum(by, size - 1).astype(a.dtype)
            shifted = a << inside if name == "shl" else a >> inside
            return np.where(by < size, shifted, a >> (size - 1) if kind[0] == "s" else 0).astype(a.dtype)
        if name == "mul.wide":
            return a.astype(TYPES[wide]) * self.get(operands[1], kind).astype(TYPES[wide])
        if name == "mad.wide":
            product = a.astype(TYPES[wide]) * self.get(operands[1], kind).astype(TYPES[wide])
            return product + self.get(operands[2], wide)
        if name == "mad.lo":
            return a * self.get(operands[1], kind) + self.get(operands[2], kind)
        if name == "bfe":
            start, length = int(operands[1], 0), int(operands[2], 0)
            return a >> np.uint32(start) & np.uint32((1 << length) - 1)
        if name == "bfi":
            start, mask = int(operands[2], 0), (1 << int(operands[3], 0)) - 1 << int(operands[2], 0)
            return a << np.uint32(start) & np.uint32(mask) | self.get(operands[1], kind) & np.uint32(~mask & 2**32 - 1)
        if name == "prmt":
            return self.permuted(a, self.get(operands[1], kind), self.get(operands[2], "u32"))
        ones: dict[str, Callable] = {"neg": np.negative, "abs": np.abs, "sqrt": np.sqrt, "not": np.invert}
        return ones[name](a)

    def permuted(self, a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
        both = np.stack([a, b], axis=1).astype("u4").view("u1")  # (LANES, 8)
        chosen = np.stack([selector >> np.uint32(4 * i) & np.uint32(7) for i in range(4)], axis=1)
        if (selector >> np.uint32(3) & np.uint32(0x1111)).any():
            raise NotImplementedError("prmt that repeats signs")
        return np.ascontiguousarray(np.take_along_axis(both, chosen.astype(int), axis=1)).view("u4")[:, 0]

    def converted(self, operand: str, to: str, kind: str, truncate: bool) -> Lanes:
        values = self.get(operand, kind)
        if truncate:  # a NaN becomes zero
            values = np.trunc(np.where(values == values, values, 0)).clip(-(2.0**31), 2.0**31 - 128)
        result = values.astype(TYPES[to])
        return result

    def moved(self, target: str, operand: str, kind: str, where: Lanes) -> None:
        """`mov`, which may join two registers, or take one apart."""
        half = f"u{4 * TYPES[kind].itemsize}" if kind != "pred" else kind
        if target[0] == "{":
            size, bits = 4 * TYPES[kind].itemsize, self.get(operand, kind)
            for i, part in enumerate(target.strip("{} ").split(",")):
                if part.strip() != "_":
                    self.set(part.strip(), (bits >> bits.dtype.type(size * i)).astype(TYPES[half]), where)
        elif operand[0] == "{":
            low, high = (self.get(part.strip(), half) for part in operand.strip("{} ").split(","))
            self.set(target, np.ascontiguousarray(np.stack([low, high], axis=1)).view(TYPES[kind])[:, 0], where)
        else:
            self.set(target, self.get(operand, kind), where)


Instruction = tuple[str, bool, str, list[str]]  # predicate or "", whether it is negated, operation, operands


def parse(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions, and where labels are among them."""
    body = re.sub(r"//[^\n]*", "", text[text.index("\n{") + 2 : text.index("\n}")])
    instructions: list[Instruction] = []
    labels = {}
    for line in (line.strip() for line in body.splitlines()):
        if line.endswith(":"):
            labels[line[:-1]] = len(instructions)
        elif line and line[0] != ".":
            found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([a-z][\w.]*)\s*(.*?)\s*;", line)
            if found is None:
                raise NotImplementedError(line)
            negated, predicate, operation, rest = found.groups()
            operands = [part.strip() for part in re.split(r",(?![^{]*\})", rest)] if rest else []
            if operation.startswith(("ld", "st")):
                operands = [operand.strip("{} ") for operand in operands]
            instructions.append((predicate or "", bool(negated), operation, operands))
    return instructions, labels


def raw(argument: object) -> int:
    """An argument of a kernel as bits: a tensor by its address."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    return int(np.float32(argument).view("u4")) if isinstance(argument, float) else argument


def run(text: str, programs: int, parameters: Sequence[int]) -> None:
    """Runs a kernel, all programs of its grid one after the other, on this process's memory."""
    instructions, labels = parse(text)
    for program in range(programs):
        warp, at = Warp(parameters, program), 0
        with np.errstate(all="ignore"):
            while instructions[at][2] != "ret":
                predicate, negated, operation, operands = instructions[at]
                at += 1
                where = np.ones(LANES, bool)
                if predicate:
                    where = (warp.get(predicate, "pred") != 0) ^ negated
                if operation.startswith("bra"):
                    if where.any() != where.all():
                        raise NotImplementedError("lanes that part")
                    at = labels[operands[0]] if where.all() else at
                else:
                    warp.execute(operation, operands, where)
