"""A page about training runs: ``python -m hvd_dyncomp.report RUN_DIR ... --output FILE``.

From the bottom up: `markup` (text that cannot break out of a page), `runs` (what the files contain), `drawing` (scales
and axes), the figures `curves`, `bars` and `heatmap`, `tables`, and `page`, which puts them together. They need only
Python's standard library.
"""
