"""Programs in launch/ import their neighbours plainly, as scripts do; so do tests that use them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launch"))
