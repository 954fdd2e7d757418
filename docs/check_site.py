"""Check that each link within the built site leads to a page and an anchor, and that no code block is broken.

`zensical build --strict` checks the links between Markdown files.  This checks the result, which includes links to and
from what is generated, such as the API reference.  `make docs` runs it.
"""

import re
import sys
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

SITE = Path(__file__).parents[1] / "build" / "site"
HOST, PREFIX = "http://site", "/zmdp/"
"""A place for the site, which has none until it is published.  It may be a folder, so nothing leads out of it."""


@dataclass
class Page(HTMLParser):
    """The anchors of a page, where its links lead, and whether it shows the marks of a code block."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    broken_block: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's id and its link."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in {"href", "src"}:
                self.links.append(value or "")

    def handle_data(self, data: str) -> None:
        """Note the marks."""
        self.broken_block |= "```" in data


def read(path: Path) -> Page:
    """Return a page."""
    page = Page()
    page.feed(path.read_text())
    return page


def read_pages(site: Path) -> dict[Path, Page]:
    """Return all pages of a site."""
    return {path: read(path) for path in sorted(site.rglob("*.html"))}


def broken_blocks(site: Path) -> list[str]:
    """Return the pages that show the marks of a code block."""
    return [str(path.relative_to(site)) for path, page in read_pages(site).items() if page.broken_block]


def broken_links(site: Path) -> list[str]:
    """Return the links of a site that lead nowhere, each after the page that has it."""
    pages = read_pages(site)
    return [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # which is shown at any address, and so has links from the root
        for link in page.links
        if not leads_somewhere(link, path, pages, site)
    ]


def broken_contents(site: Path) -> list[str]:
    """Return the links of the site's llms.txt that lead nowhere."""
    contents = site / "llms.txt"
    links = re.findall(r"\]\((.*?)\)", contents.read_text())
    return [f"llms.txt: {link}" for link in links if not leads_somewhere(link, contents, {}, site)]


def leads_somewhere(link: str, path: Path, pages: dict[Path, Page], site: Path) -> bool:
    """Return whether a link leads to a file of the site and its anchor exists, or leads elsewhere."""
    url = urlsplit(urljoin(f"{HOST}{PREFIX}{path.relative_to(site)}", link))
    if f"{url.scheme}://{url.netloc}" != HOST:
        return True
    if not url.path.startswith(PREFIX):
        return False
    target = site / unquote(url.path.removeprefix(PREFIX))
    if target.is_dir():
        target /= "index.html"
    if not url.fragment or target not in pages:
        return target.is_file()
    return unquote(url.fragment) in pages[target].anchors


def main() -> None:
    """Print what is broken.  Exit with 1 if anything is."""
    if broken := broken_links(SITE) + broken_contents(SITE):
        sys.exit("\n".join(["These links lead nowhere:", *broken]))
    if broken := broken_blocks(SITE):
        sys.exit("\n".join(["These pages have code blocks that are not closed or not understood:", *broken]))


if __name__ == "__main__":
    main()
