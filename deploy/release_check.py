"""Check that a release is complete: `python deploy/release_check.py [TAG]`.  `make release-check` does more.

The version is that of the package; tag and changelog must agree with it.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r'^__version__ = "([^"]*)"$', re.MULTILINE)
RELEASED = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")


def problems(package: str, changelog: str, tag: str = "") -> list[str]:
    """Return what is wrong with a release, given the texts of the package's `version.py` and of the changelog."""
    (version,) = VERSION.findall(package)
    found = []
    if not RELEASED.fullmatch(version):
        found.append(f"__version__ is {version}, which is not the version of a release, such as 0.1.0")
    if tag and tag != f"v{version}":
        found.append(f"the tag is {tag}, but __version__ is {version}: the tag must be v{version}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    titles = [section.partition("\n")[0] for section in sections]
    dated = re.compile(rf"{re.escape(version)} - \d{{4}}-\d\d-\d\d")
    entry = next((section for section, title in zip(sections, titles, strict=True) if dated.fullmatch(title)), None)
    if entry is None:
        found.append(f"CHANGELOG.md has no section '## {version} - YYYY-MM-DD': give Unreleased this title")
    elif "\n- " not in entry:
        found.append(f"CHANGELOG.md says nothing about {version}")
    return found


def main() -> int:
    """Print the problems.  Return 1 if there are any."""
    package, changelog = ROOT / "src" / "zmdp" / "version.py", ROOT / "CHANGELOG.md"
    found = problems(package.read_text(), changelog.read_text(), *sys.argv[1:])
    print("\n".join(found) or "the versions agree, and the changelog has an entry")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
