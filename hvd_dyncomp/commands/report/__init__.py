"""A page about training runs: ``python -m hvd_dyncomp report RUN_DIR ... --output FILE``.

From the bottom up: `runs` (what the files contain), `tables`, `figures` (by matplotlib), and `page`, which fills
``page.html``.
"""
