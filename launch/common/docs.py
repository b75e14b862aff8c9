"""Where the programs write what docs/ shows: raw records, and the tables and figures that are made of them."""

from __future__ import annotations

from pathlib import Path

DOCS = Path("docs")
DATA, TABLES, FIGURES = "data", "tables", "figures"  # folders in it
