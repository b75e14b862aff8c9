"""What the site has that docs/ does not say.

Its first page is README.md, headings have GitHub's anchors, and it has the source files that docs/api/ links to.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pymdownx.slugs import slugify

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
SOURCE = re.compile(r"\]\(\.\./\.\./(hvd_dyncomp/[\w/]+\.py)\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    options: dict[str, Any] = config.mdx_configs.setdefault("toc", {})
    options["slugify"] = slugify(case="lower")
    config.watch.append(str(README))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    text = README.read_text(encoding="utf-8")
    files.append(File.generated(config, "index.md", content=re.sub(r"\]\(docs/", "](", text)))
    pages = (path.read_text(encoding="utf-8") for path in (ROOT / "docs" / "api").glob("*.md"))
    for source in {found for page in pages for found in SOURCE.findall(page)}:
        # As text, which browsers show; a .py file they would store.
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, f"source/{source}.txt", content=text))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    return SOURCE.sub(r"](../source/\1.txt)", markdown) if page.file.src_uri.startswith("api/") else markdown
