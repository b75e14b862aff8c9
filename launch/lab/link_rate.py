"""Measures what links really carry: one TCP connection between two hosts of netlab.py, for every rate.

    python launch/link_rate.py --rates 100mbit,1gbit,10gbit,none

Payload is what the receiving program got. Wire is what the interface sent, with the headers of Ethernet, IP and TCP,
which the token bucket counts as well: a payload of 95 % of the rate is what a real link with packets of 1500 bytes has.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import IO, cast

from common.course import RunError
from lab.hosts import Lab, hosts
from lab.shaping import bits_per_second

_TRANSFER = [sys.executable, str(Path(__file__).with_name("transfer.py"))]


def measure(lab: Lab, nbytes: int) -> float:
    """Bits per second of payload from the first host to the second."""
    receiver = subprocess.Popen(lab.on_host(1, [*_TRANSFER, "receive"]), stdout=subprocess.PIPE, text=True)
    try:
        said = cast(IO[str], receiver.stdout)
        said.readline()
        subprocess.run(lab.on_host(0, [*_TRANSFER, "send", lab.addresses[1], str(nbytes)]), check=True)
        return float(said.readline())
    finally:
        receiver.kill()
        receiver.wait()


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", default="100mbit,1gbit,10gbit,none", metavar="RATE,...")
    parser.add_argument("--seconds", type=float, default=2.0, metavar="S", help="about so long for each rate")
    args = parser.parse_args(argv)
    try:
        print("| rate | payload, Mbit/s | % of the rate |\n|---|---:|---:|")
        with hosts() as lab:
            for rate in args.rates.split(","):
                lab.set_rate(rate)
                asked = bits_per_second(rate)
                reached = measure(lab, int((asked or 20e9) * args.seconds / 8))
                share = f"{100 * reached / asked:.1f}" if asked else ""
                print(f"| {rate} | {reached / 1e6:.1f} | {share} |", flush=True)
    except (RunError, ValueError) as error:
        parser.exit(2, f"link_rate.py: error: {error}\n")


if __name__ == "__main__":
    main()
