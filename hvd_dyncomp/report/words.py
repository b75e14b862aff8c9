"""How the page writes quantities."""

from __future__ import annotations

from hvd_dyncomp.report.markup import decimal
from hvd_dyncomp.report.runs import Switch

UNCOMPRESSED = 32


def bits(level: float) -> str:
    return f"{decimal(level, 3)} bit" if level <= 1 else f"{decimal(level, 3)} bits"


def epochs(first: int, last: int) -> str:
    """Epochs counted from 0, written from 1."""
    return f"epoch {first + 1}" if first == last else f"epochs {first + 1} to {last + 1}"


def switched(switch: Switch) -> str:
    reason = f": {switch.reason}" if switch.reason else ""
    after = f"{bits(switch.after)}{' (uncompressed)' if switch.after == UNCOMPRESSED else ''}"
    return f"after epoch {switch.epoch + 1} from {decimal(switch.before, 3)} to {after}{reason}"


def megabytes(nbytes: float | None) -> str:
    """MB of 10^6 bytes, with at least three digits."""
    if nbytes is None:
        return "—"
    size = nbytes / 1e6
    return decimal(size, 0 if abs(size) >= 100 else 1 if abs(size) >= 10 else 2 if abs(size) >= 1 else 3)


def percent(fraction: float | None, places: int = 2) -> str:
    return "—" if fraction is None else f"{100 * fraction:.{places}f}"


def share(part: float | None, whole: float | None) -> str:
    """``part`` in % of ``whole``."""
    return percent(part / whole, 1) if part is not None and whole else "—"


def minutes(seconds: float | None) -> str:
    return "—" if seconds is None else f"{seconds / 60:.1f}" if seconds >= 600 else f"{seconds / 60:.2f}"
