"""Measures what links really carry: one TCP connection between two hosts, for every rate.

    python launch/bench links --rates 100mbit,1gbit,10gbit,none

Payload is what the receiving program got. A payload of 95 % of the rate is what a real link with packets of 1500 bytes
has: the token bucket counts the headers of Ethernet, IP and TCP as well. Shows a Markdown table; writes no file.
"""

from __future__ import annotations

import argparse

from common.markdown import markdown
from common.values import at_least_zero
from netlab.hosts import hosts
from netlab.link_rate import measure
from netlab.shaping import bits_per_second


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this measurement can be told, and its defaults."""
    parser.set_defaults(run=run)
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit,none", metavar="RATE,...", help="none: no limit")
    parser.add_argument("--seconds", type=at_least_zero, default=2.0, metavar="S", help="about so long for each rate")


def run(args: argparse.Namespace) -> None:
    """Measure and show.

    Raises:
        RunError: the network cannot be made.
        ValueError: a rate is not one.
    """
    rows: list[tuple[str, ...]] = []
    with hosts() as lab:
        for rate in args.rates.split(","):
            lab.set_rate(rate)
            asked = bits_per_second(rate)
            reached = measure(lab, int((asked or 20e9) * args.seconds / 8))
            rows.append((rate, f"{reached / 1e6:.1f}", f"{100 * reached / asked:.1f}" if asked else ""))
    print(markdown(("rate", "payload, Mbit/s", "% of the rate"), rows))
