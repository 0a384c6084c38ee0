"""`make docs` finds what a reader of the built site would stumble over. It builds all pages; these are small ones."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
from docs_pages import ROOT

from runner.config.settings import settings

INCLUDES = '```py\n--8<-- "conf/sampler/elastic.yaml"\n```\n'


@pytest.mark.parametrize(
    ("html", "source", "warning"),
    [
        ("<p>a <code>::: b</code></p> <pre><code>| a |</code></pre> <img src='here.png'>", "", None),
        ("<pre><code><span>--</span><span>8</span> &lt; --&quot;a.py&quot;</code></pre>", "", "its source: --8 < --"),
        ("<p>--8&lt;-- &quot;a.py&quot;</p>", "", "its source: --8<--"),
        ("<p>::: exactdata</p>", "", "its source: :::"),
        ("<p>a\n!!! note</p>", "", "its source: !!!"),
        ("<p>| a | b |\n</p>", "", "its source: | a | b |"),
        ("<p>[a](b.md)</p>", "", "its source: ]("),
        ("<pre>1</pre><pre><code> \n</code></pre>", "", "code block 2 is empty"),
        ("<img src='gone.png'>", "", "gone.png is not there to be loaded"),
        ("<pre><code>{text}</code></pre>", INCLUDES, None),
        ("<pre><code>defaults:</code></pre>", INCLUDES, "does not show the text of conf/sampler/elastic.yaml"),
    ],
)
def test_a_page_that_shows_something_else_is_a_warning(
    html: str, source: str, warning: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each page of the table is the only one of a site; mkdocs counts what its logger is warned of."""
    text = (ROOT / "conf" / "sampler" / "elastic.yaml").read_text()
    (tmp_path / "page.html").write_text(html.replace("{text}", text))
    (tmp_path / "page.md").write_text(source)
    (tmp_path / "here.png").touch()
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    hooks["on_post_build"](SimpleNamespace(site_dir=tmp_path, docs_dir=tmp_path))
    assert [record.name for record in caplog.records] == ["mkdocs.hooks"] * (warning is not None)
    assert all(record.message.startswith("page.html: ") for record in caplog.records)
    assert (warning or "") in caplog.text


def test_the_page_of_the_settings_has_them_all_as_tables() -> None:
    """Between the backticks of their first column, and without a `|` that would end a cell."""
    hooks = runpy.run_path(str(ROOT / "docs" / "site" / "hooks.py"))
    source = (ROOT / "docs" / "reference" / "settings.md").read_text()
    page = hooks["on_page_markdown"](
        source, page=SimpleNamespace(file=SimpleNamespace(src_uri="reference/settings.md"))
    )
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == [row.key for row in settings()]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {7}
    assert "## checkpoint" in page
