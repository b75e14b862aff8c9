"""Run a program as it is, with its models compressed: `python -m hvd_dyncomp run`."""
