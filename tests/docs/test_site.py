"""Checks of the site that need nothing of what builds it: the navigation has every page, and broken links are found."""

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = "reference/commands.md"


def script(name):
    """Return a program in `docs/` as a module."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_navigation_has_every_page_once():
    nav = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]
    pages = [page for page in script("generate").pages_of(nav) if "://" not in page]
    written = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert sorted(pages) == sorted(written | {GENERATED})


def test_llms_txt_leads_to_every_page(tmp_path, check_site):
    """A site without one page has one link that leads nowhere."""
    for page in {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} | {GENERATED}:
        path = tmp_path / page.removesuffix("index.md").removesuffix(".md") / "index.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "llms.txt").write_text(script("generate").llms())
    assert check_site.broken_contents(tmp_path) == []
    (tmp_path / "start" / "index.html").unlink()
    assert check_site.broken_contents(tmp_path) == ["llms.txt: start/"]


def test_every_page_begins_with_its_title():
    """A site shows the first heading as the title; what follows says what the reader gets here."""
    for page in sorted(DOCS.rglob("*.md")):
        assert re.match(r"# \S.*\n\n[^#\n]", page.read_text()), page


@pytest.fixture
def check_site():
    return script("check_site")


@pytest.mark.parametrize(
    ("link", "broken"),
    [
        ("#here", False),
        ("#elsewhere", True),
        ("../", False),
        ("../#top", False),
        ("../#here", True),
        ("../image.svg", False),
        ("../lost.svg", True),
        ("../lost/", True),
        ("/", True),
        ("../../image.svg", True),
        ("https://example.com/#any", False),
        ("mailto:somebody@example.com", False),
    ],
)
def test_links_of_the_site_that_lead_nowhere_are_found(link, broken, tmp_path, check_site):
    (tmp_path / "page").mkdir()
    (tmp_path / "image.svg").touch()
    (tmp_path / "index.html").write_text('<h1 id="top">Top</h1>')
    (tmp_path / "page" / "index.html").write_text(f'<p id="here"><a href="{link}">a link</a></p>')
    assert check_site.broken_links(tmp_path) == ([f"page/index.html: {link}"] if broken else [])


def test_code_blocks_that_are_shown_as_text_are_found(tmp_path, check_site):
    (tmp_path / "good.html").write_text("<pre><code>``text``</code></pre>")
    (tmp_path / "bad.html").write_text("<p>```x1 smallest</p>")
    assert check_site.broken_blocks(tmp_path) == ["bad.html"]
