"""Link rates: how they are written, and the token bucket that holds an interface to one.

Rates are written as tc writes them: "100mbit", "1gbit", "2.5gbit", "512kbit"; "none" leaves a link as fast as it is.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

_UNITS = {"bit": 1, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
INTERFACE = "eth0"

# The bucket: what may leave at once after a pause. A millisecond of it keeps the timer's grain from costing rate at
# 10 Gbit/s, where a timer's delay is worth megabits; at least some packets, at most what is nothing beside a gradient.
_BURST_SECONDS, _LEAST_BURST = 1e-3, 16_000
# The queue in front of it: longer than any TCP window we have seen, so that no packet is dropped and sent again. A
# retransmission would be counted as traffic.
_QUEUE_BYTES = 64_000_000


def bits_per_second(rate: str) -> float | None:
    """The number that a rate stands for; None for "none".

    Raises:
        ValueError: it is not a rate.
    """
    if rate == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(bit|kbit|mbit|gbit)", rate)
    if match is None or float(match[1]) * _UNITS[match[2]] < 1000:
        raise ValueError(f"{rate!r} is not a link rate such as 100mbit, 2.5gbit or none")
    return float(match[1]) * _UNITS[match[2]]


def shape(rate: str, inside: Sequence[str] = ()) -> None:
    """Hold what leaves an interface called eth0 to a rate, from now on. Needs root.

    Args:
        rate: see above.
        inside: "-n NAME" for the network namespace NAME; by default the caller's own.

    Raises:
        ValueError: it is not a rate.
        subprocess.CalledProcessError: tc refused it.
    """
    bits = bits_per_second(rate)
    tc = ["tc", *inside, "qdisc"]
    if bits is None:
        # Fails where there is nothing to delete, which is as well.
        subprocess.run([*tc, "delete", "dev", INTERFACE, "root"], capture_output=True)
        return
    burst = max(_LEAST_BURST, int(bits / 8 * _BURST_SECONDS))
    bucket = ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "limit", str(_QUEUE_BYTES)]
    subprocess.run([*tc, "replace", "dev", INTERFACE, "root", *bucket], check=True, capture_output=True, text=True)
