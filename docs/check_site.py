"""Check that every link within the built site leads to a page and an anchor: `python docs/check_site.py`.

`zensical build --strict` checks the links between Markdown files.  This checks the result, which includes links to and
from what is generated, such as the API reference.
"""

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
    """The anchors of a page, and where its links lead."""

    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note an element's id and its link."""
        for name, value in attrs:
            if name == "id" or (tag == "a" and name == "name"):
                self.anchors.add(value or "")
            elif name in {"href", "src"}:
                self.links.append(value or "")


def read(path: Path) -> Page:
    """Return a page."""
    page = Page()
    page.feed(path.read_text())
    return page


def broken_links(site: Path) -> list[str]:
    """Return the links of a site that lead nowhere, each after the page that has it."""
    pages = {path: read(path) for path in sorted(site.rglob("*.html"))}
    return [
        f"{path.relative_to(site)}: {link}"
        for path, page in pages.items()
        if path.name != "404.html"  # which is shown at any address, and so has links from the root
        for link in page.links
        if not leads_somewhere(link, path, pages, site)
    ]


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
    """Print the broken links.  Exit with 1 if there are any."""
    if broken := broken_links(SITE):
        sys.exit("\n".join(["These links lead nowhere:", *broken]))


if __name__ == "__main__":
    main()
