"""What a run says and leaves behind: progress on rank 0, metrics.jsonl, summary.json."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from common.errors import RunError
from common.files import replace_text
from common.lines import say
from train.carried import Carried

try:
    from tqdm import tqdm
except ImportError:  # it only draws bars: `pip install .` and torchrun are enough to train
    tqdm = None

if TYPE_CHECKING:  # the study reads this file, too, and needs no Horovod
    from train.engine import Score

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"


class Progress:
    """A bar over the steps of an epoch where it can be drawn again in its place, and one line after each epoch.

    That is where stderr is a terminal. Under horovodrun and mpirun it is a pipe, and what comes out of it gets tags.
    """

    def __init__(self, mode: str, epochs: int, *, rank: int) -> None:
        self._silent = rank != 0
        self._bars = not self._silent and mode == "auto" and tqdm is not None and sys.stderr.isatty()
        self._epochs = epochs
        self._bar: Any = None

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if not self._silent and self._bar is not None:
            tqdm.write(text, file=sys.stdout)
        elif not self._silent:
            say(text)

    def begin(self, epoch: int, steps: int) -> None:
        if self._bars:
            self._bar = tqdm(total=steps, desc=f"epoch {epoch + 1}/{self._epochs}", unit="step", leave=False)

    def step(self, score: Score, level: float, saved: float) -> None:
        """One step is done; ``saved`` is the meter's fraction of float32's bytes, over the epoch so far."""
        if self._bar is not None:
            self._bar.set_postfix_str(
                f"loss {score.mean_loss:.3f}, accuracy {score.accuracy:.1%}, {level} bits, {_saved(saved)}",
                refresh=False,
            )
            self._bar.update()

    def end(self, line: dict[str, Any]) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self.say(_sentence(line, self._epochs))


def _sentence(line: dict[str, Any], epochs: int) -> str:
    following = f" -> {line['next_level']} bits ({line['reason']})" if line["next_level"] != line["level"] else ""
    sent = Carried.of(line).in_words(f" ({_saved(line['saved_fraction'])})")
    steps = line["steps_by_level"]
    tried = (
        ", ".join(f"{count} at {bits}" for bits, count in steps.items()) if set(steps) != {str(line["level"])} else ""
    )
    return (
        f"epoch {line['epoch'] + 1:>2}/{epochs}  {line['level']:>2} bits  loss {_text(line['train_loss'], '.3f')}  "
        f"accuracy train {_text(line['train_accuracy'], '.1%')} val {_text(line['val_accuracy'], '.1%')} "
        f"test {_text(line['test_accuracy'], '.1%')}  {sent}  {line['seconds']:.1f} s "
        f"(compute {line['seconds_compute']:.1f}, exchange {line['seconds_exchange']:.1f})"
        f"{f'  steps: {tried} bits' if tried else ''}{following}"
    )


def _saved(fraction: float) -> str:
    """Whole percent. At 32 bits headers come on top: of a small model's bytes, several percent."""
    percent = round(100 * fraction)
    return f"{percent}% saved" if percent >= 0 else f"{-percent}% more than float32"


def _text(value: float | None, form: str) -> str:
    return "nan" if value is None else format(value, form)


class Metrics:
    """The file of JSON lines, one per epoch. On rank 0 only."""

    def __init__(self, output_dir: Path) -> None:
        self.path = output_dir / METRICS
        self.lines: list[dict[str, Any]] = []

    def keep(self, epochs: int) -> None:
        """Drop what lies beyond the first ``epochs`` epochs: a run that stopped between metrics and checkpoint.

        Raises:
            RunError: the file is missing or damaged, or epochs are not in it.
        """
        lines = read_lines(self.path)
        for number, line in enumerate(lines, start=1):
            missing = [key for key in _NEEDED if key not in line]
            if missing:
                raise RunError(f"{self.path}: line {number} lacks {', '.join(missing)}")
            if line["epoch"] != number - 1:
                raise RunError(f"{self.path}: line {number} is of epoch {line['epoch']}, and not of {number - 1}")
        self.lines = lines[:epochs]
        if len(self.lines) != epochs:
            raise RunError(f"{self.path} has {len(self.lines)} of the {epochs} epochs that the checkpoint has seen")
        replace_text(self.path, "".join(_encode(line) + "\n" for line in self.lines))

    def forget(self) -> None:
        """Begin anew: a run that stopped before its first checkpoint."""
        self.path.unlink(missing_ok=True)

    def add(self, line: dict[str, Any]) -> None:
        """Append a line; NaN and infinities, which JSON does not know, become null.

        Raises:
            RunError: it cannot be written.
        """
        self.lines.append(line)
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(_encode(line) + "\n")
        except OSError as error:
            raise RunError(f"{self.path} cannot be written: {error.strerror}") from error


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut short is left out.

    Raises:
        RunError: another line is no JSON object, or the file is missing.
    """
    try:
        # Bytes that are no text are damage like any other, to one line only.
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        raise RunError(f"{path} is missing") from None
    lines = []
    for number, text in enumerate(texts, start=1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line = None
        if isinstance(line, dict):
            lines.append(line)
        elif number < len(texts):
            raise RunError(f"{path}: line {number} is no JSON object")
    return lines


def write_summary(output_dir: Path, config: dict[str, Any], lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Write summary.json: the arguments, the last epoch's accuracies, the sums of bytes and seconds.

    Bytes are means as in metrics.jsonl (`train.traffic.over_ranks`). ``released`` holds the same sums over the
    epochs at 32 bits of a run that compresses.
    """
    last = lines[-1]
    released = [line for line in lines if line["level"] == 32 and config["compression"] in ("static", "dynamic")]
    summary = {
        "config": config,
        "epochs": len(lines),
        **{key: last[key] for key in _LAST},
        "levels": [line["level"] for line in lines],
        **_sums(lines),
        "released": {"epochs": len(released), **_sums(released)},
    }
    replace_text(output_dir / SUMMARY, _encode(summary, indent=2) + "\n")
    return summary


_SUMMED = (
    "bytes_sent",
    "bytes_float32",
    "bytes_leaving_host",
    "bytes_staying_on_host",
    "bytes_float32_leaving_host",
    "seconds",
    "seconds_compute",
    "seconds_exchange",
)
_LAST = ("train_accuracy", "val_accuracy", "test_accuracy", "train_loss", "test_loss", "hosts")
_NEEDED = ("epoch", "level", *_SUMMED, *_LAST)  # what a summary is made of


def _sums(lines: list[dict[str, Any]]) -> dict[str, float]:
    return {key: sum(line[key] for line in lines) for key in _SUMMED}


def _encode(value: Any, indent: int | None = None) -> str:
    return json.dumps(_without_nan(value), indent=indent, allow_nan=False)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
