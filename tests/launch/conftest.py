"""Programs in launch/ import their neighbours plainly, as scripts do; so do their tests."""

import sys
from pathlib import Path

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
sys.path.insert(0, str(LAUNCH))
