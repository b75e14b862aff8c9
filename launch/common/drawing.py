"""matplotlib for files, and the colours that all figures share."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")  # files only: no display is there, or needed

from matplotlib import pyplot as plt

__all__ = ["COLOURS", "plt"]

# Okabe and Ito's, which colour-blind readers tell apart, and a few more for figures with many lines.
COLOURS = {
    **{"black": "#000000", "orange": "#E69F00", "sky": "#56B4E9", "green": "#009E73", "yellow": "#F0E442"},
    **{"blue": "#0072B2", "red": "#D55E00", "pink": "#CC79A7", "grey": "#999999", "wine": "#882255"},
}
