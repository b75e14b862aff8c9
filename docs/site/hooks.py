"""What the site has that docs/ does not say: its first page is README.md, and headings have GitHub's anchors."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from pymdownx.slugs import slugify

README = Path(__file__).parents[2] / "README.md"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    options: dict[str, Any] = config.mdx_configs.setdefault("toc", {})
    options["slugify"] = slugify(case="lower")
    config.watch.append(str(README))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    text = README.read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    return files
