"""Names of torch that its documentation does not have. Where one is gone, an error says so, and names torch's version.

What needs one asks before it changes anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

GONE = (
    "{} of torch {} has no {!r}, which hvd_dyncomp needs; use a version of torch that README.md names, or a newer "
    "hvd_dyncomp"
)


def check_names(owner: Any, names: Iterable[str]) -> None:
    """Check that an object of torch's has some attributes.

    Raises:
        RuntimeError: it lacks one.
    """
    for name in names:
        if not hasattr(owner, name):
            kind = getattr(owner, "__name__", None) or type(owner).__name__
            raise RuntimeError(GONE.format(kind, torch.__version__, name))
