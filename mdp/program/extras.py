"""Say how to install the packages of an extra, in the errors about one that is missing."""

import json
import shlex
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from ..errors import SettingError

PACKAGE: Final = "zmdp"
WEB_PACKAGES: Final = ("jinja2", "prometheus_client", "starlette", "uvicorn", "uvloop")
"""What the extra `web` has that dashboards and the gateway need."""
CHECKOUT: Final = "/path/to/zmdp"
"""Stands for a checkout whose place is unknown, as on the pages."""


def install_command(*extras: str) -> str:
    """Return the command that adds `extras` to this installation, to be copied into a shell.

    It installs from where this zmdp came from, which pip and uv have recorded: a package of the same name on an index
    may be another one.
    """
    from importlib.metadata import PackageNotFoundError, distribution  # noqa: PLC0415 - only errors need what is slow
    from urllib.parse import urlsplit  # noqa: PLC0415
    from urllib.request import url2pathname  # noqa: PLC0415

    names = ",".join(extras)
    try:
        installed = distribution(PACKAGE)
    except PackageNotFoundError:  # an archive, or a folder on sys.path
        return _command("pip", f"{CHECKOUT}[{names}]")
    tool = "uv pip" if (installed.read_text("INSTALLER") or "").strip() == "uv" else "pip"
    origin = installed.read_text("direct_url.json")  # https://packaging.python.org/specifications/direct-url
    if origin is None:  # from an index
        return _command(tool, f"{PACKAGE}[{names}]")
    record = json.loads(origin)
    url = record["url"]
    if "dir_info" in record:
        folder = url2pathname(urlsplit(url).path)
        if not Path(folder).is_dir():  # deleted after the installation, as in an image
            folder = CHECKOUT
        return _command(tool, f"{folder}[{names}]", editable=record["dir_info"].get("editable", False))
    if vcs := record.get("vcs_info"):
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return _command(tool, f"{PACKAGE}[{names}] @ {url}")


@contextmanager
def needs_extra(extra: str) -> Generator[None]:
    """Within this context, raise `SettingError` if an import fails because a package of the extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith(PACKAGE):
            raise
        text = f"this needs further packages ({error.name} is missing): {install_command(extra)}"
        raise SettingError(text) from None


def _command(tool: str, requirement: str, *, editable: bool = False) -> str:
    return f"{tool} install {'-e ' if editable else ''}{shlex.quote(requirement)}"
