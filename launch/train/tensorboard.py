"""The lines of metrics.jsonl as scalars for TensorBoard, which is there only where somebody has installed it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from common.errors import RunError

FOLDER = "tensorboard"  # in the output folder


def writer_class() -> type:
    """torch's SummaryWriter.

    Raises:
        RunError: TensorBoard is missing, or too old.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError(f"--tensorboard: needs TensorBoard: pip install tensorboard ({error})") from error
    return SummaryWriter


class Board:
    """Writes one step for each finished epoch, counted from 1 as in the lines that people read. On rank 0 only."""

    def __init__(self, output_dir: Path, earlier: Sequence[Mapping[str, Any]] = ()) -> None:
        """Begin, or go on after ``earlier``, the lines of a run that is resumed.

        Raises:
            RunError: TensorBoard is missing.
            OSError: the folder cannot be written.
        """
        folder = output_dir / FOLDER
        known = folder.exists()
        # What an interrupted run wrote beyond its last checkpoint is trained once more: TensorBoard forgets it.
        self._writer = writer_class()(str(folder), purge_step=len(earlier) + 1 if known else None)
        for line in () if known else earlier:  # they were written without --tensorboard
            self.add(line)

    def add(self, line: Mapping[str, Any]) -> None:
        """Write an epoch, and have it on disk."""
        for name, value in scalars(line).items():
            self._writer.add_scalar(name, value, line["epoch"] + 1)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def scalars(line: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a line of metrics.jsonl, by the names that TensorBoard groups at the slash.

    ``bits_a_value`` is what was sent, of float32's 32 bits; null, JSON's NaN, is left out.
    """
    named = {"level/level": line["level"], "level/bits_a_value": _bits(line)}
    named |= {f"accuracy/{part}": line[f"{part}_accuracy"] for part in ("train", "val", "test")}
    named |= {f"loss/{part}": line[f"{part}_loss"] for part in ("train", "val", "test")}
    named |= {f"bytes/{key}": line[f"bytes_{key}"] for key in ("sent", "float32", "leaving_host", "staying_on_host")}
    named |= {"seconds/epoch": line["seconds"]}
    named |= {f"seconds/{part}": line[f"seconds_{part}"] for part in ("compute", "exchange")}
    # A run that is resumed may have lines without these.
    named |= {f"tensor_errors/{name}": value for name, value in line.get("tensor_errors", {}).items()}
    return {name: value for name, value in named.items() if value is not None}


def _bits(line: Mapping[str, Any]) -> float | None:
    """Where there are several hosts, of what leaves them; None where nothing is sent, by one worker."""
    between_hosts = "_leaving_host" if line["bytes_float32_leaving_host"] else ""
    sent, float32 = line[f"bytes{between_hosts or '_sent'}"], line[f"bytes_float32{between_hosts}"]
    return 32 * sent / float32 if float32 else None
