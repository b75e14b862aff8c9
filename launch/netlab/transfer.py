"""The two ends of one TCP connection between two hosts. Started by link_rate.py, on each host one, not by hand.

transfer.py receive
transfer.py send ADDRESS BYTES
"""

from __future__ import annotations

import socket
import sys
import time

_PORT = 5201
_CHUNK = 1 << 20


def receive() -> None:
    """Print the payload's bits per second of one connection, from the first byte to the last."""
    with socket.create_server(("", _PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        buffer, received, began = bytearray(_CHUNK), 0, time.perf_counter()
        while got := connection.recv_into(buffer):
            received += got
        print(8 * received / (time.perf_counter() - began), flush=True)


def send(address: str, nbytes: int) -> None:
    chunk = bytes(_CHUNK)
    with socket.create_connection((address, _PORT)) as connection:
        for _ in range(-(-nbytes // _CHUNK)):
            connection.sendall(chunk)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive()
    else:
        send(sys.argv[2], int(sys.argv[3]))
