"""Hook into mkdocs: add pages from the top of the repository, link them, and check what a reader will see."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from textwrap import dedent
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parents[2]
LOG = logging.getLogger("mkdocs.hooks")  # with --strict, a warning of it ends the build
TOP = {
    "README.md": "index.md",
    "exactdata/README.md": "exactdata.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "LICENSE": "license.md",
}
SNIPPET = re.compile(r'^ *-+8<-+ "(.+)"$', re.MULTILINE)
MARKER = re.compile(r"-{2,} ?8 ?< ?-{2,}")
# Markdown syntax at the start of a line, or a link, which must not be visible outside of code.
RAW = re.compile(r"^\s*(?:```|~~~|:::|!!!|\?\?\?|===\s|\|.*\|\s*$|<!--|#+ )|\]\(", re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages at the top of the repository."""
    from mkdocs.structure.files import File

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
    if page.file.src_uri == "reference/settings.md":
        markdown = markdown.replace("<!-- settings -->", "\n".join(settings_tables()))
    if page.file.src_uri in TOP.values():
        markdown = re.sub(r"\]\((?:\./)?docs/", "](", markdown)
    up = "../" * page.file.src_uri.count("/")
    for source, target in TOP.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{re.escape(source)}(?=[)#])", f"]({up}{target}", markdown)
    markdown = re.sub(r"\]\((?:\./)?examples/(?:plugin/?)?\)", "](own-parts.md)", markdown)
    return re.sub(r"\]\((?:\.\./)+conf/", f"]({up}conf/", markdown)


def settings_tables() -> Iterator[str]:
    """Yield a heading and a table for each part of the config."""
    from runner.config.settings import settings

    part = ""
    for row in settings():
        if row.key.partition(".")[0] != part:
            part = row.key.partition(".")[0]
            yield f"\n## {part}\n"
            yield "| setting | type | default | allowed | may change later | |\n|---|---|---|---|---|---|"
        about = f"{row.about} ({row.option})" if row.option else row.about
        cells = [_plain(each) for each in (row.type, row.allowed, row.later, about)]
        default = f"`{row.default}`".replace("|", "\\|")
        yield f"| `{row.key}` | {cells[0]} | {default} | {' | '.join(cells[1:])} |"


def _plain(text: str) -> str:
    """Escape text so that Markdown shows it unchanged, except for code in backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        each.replace("|", "\\|") if each.startswith("`") else re.sub(r"([\\*_{}\[\]<>#|])", r"\\\1", each)
        for each in parts
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Warn of every page that is not shown as intended."""
    site = Path(config.site_dir)
    for path in sorted(site.rglob("*.html")):
        source = Path(config.docs_dir, path.relative_to(site)).with_suffix(".md")
        for fault in faults(path, source.read_text() if source.exists() else ""):
            LOG.warning("%s: %s", path.relative_to(site), fault)


def included(name: str) -> str:
    """Return the text of a file, or of the part `file:part` of one, between the markers that name the part."""
    file, _, part = name.partition(":")
    text = (ROOT / file).read_text()
    if part:
        text = dedent(re.split(rf".*-8<-- \[(?:start|end):{re.escape(part)}\].*\n", text)[1])
    return text.strip()


def faults(path: Path, source: str) -> Iterator[str]:
    """Yield the faults that a reader of the built page at `path`, written as the Markdown `source`, would see."""
    page = Shown()
    page.feed(path.read_text())
    code = "\n".join(page.blocks)
    for raw in MARKER.findall(page.prose + code) + RAW.findall(page.prose):
        yield f"shows its source: {raw.strip()}"
    for number, block in enumerate(page.blocks, start=1):
        if not block.strip():
            yield f"code block {number} is empty"
    for address in page.loaded:
        if not re.match(r"\w+:|/", address) and not (path.parent / re.split("[?#]", address)[0]).exists():
            yield f"{address} is not there to be loaded"
    for name in SNIPPET.findall(source):
        if included(name) not in code:
            yield f"does not show the text of {name}"


class Shown(HTMLParser):
    """Collect the text of a page, code blocks apart from sentences without code, and the files it loads."""

    def __init__(self) -> None:
        super().__init__()
        self.prose, self.blocks, self.loaded = "", list[str](), list[str]()
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [value for name, value in attrs if name == "src" and value]
        if tag in ("pre", "code", "script", "style"):
            self._open.append(tag)
            if tag == "pre":
                self.blocks.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open.remove(tag)

    def handle_data(self, data: str) -> None:
        if "pre" in self._open:
            self.blocks[-1] += data
        elif not self._open:
            self.prose += data
