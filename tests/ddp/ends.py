"""Runs a program, then prints checksums of its modules on this rank: ends.py PROGRAM NAME,NAME,... [ARGUMENT ...]"""

import hashlib
import runpy
import sys

program, names, *arguments = sys.argv[1:]
sys.argv = [program, *arguments]
variables = runpy.run_path(program, run_name="__main__")
for name in names.split(","):
    values = b"".join(value.numpy().tobytes() for value in variables[name].state_dict().values())
    print(f"\n{name} is {hashlib.sha256(values).hexdigest()}\n", end="", flush=True)
