"""Hooks of mkdocs: the pages that live at the top of the repository become pages of the site, and links follow them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
TOP = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository."""
    for source, target in TOP.items():
        text = (ROOT / source).read_text()
        if source == "LICENSE":
            text = f"# License\n\n```text\n{text}```\n"
        files.append(File.generated(config, target, content=text))
    for path in sorted((ROOT / "conf").rglob("*.yaml")):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), content=path.read_text()))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Point links between docs/ and the top of the repository to the pages of the site."""
    if page.file.src_uri in TOP.values():
        markdown = re.sub(r"\]\((?:\./)?docs/", "](", markdown)
    for source, target in TOP.items():
        markdown = re.sub(rf"\]\((?:\.\./)?{re.escape(source)}(?=[)#])", f"]({target}", markdown)
    markdown = re.sub(r"\]\((?:\./)?examples/(?:plugin/?)?\)", "](gallery.md)", markdown)
    return re.sub(r"\]\(\.\./conf/", "](conf/", markdown)
