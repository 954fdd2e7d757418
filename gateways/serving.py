"""The options of a gateway that listens for HTTP, and how they combine."""

import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any, Final

import click

from ..mdp.cli.console import Address, Decorator, brokers_option, key_options, limit_option, options
from ..mdp.errors import BindError
from ..mdp.transport.listening import is_loopback, listen
from .access import Access, load
from .gateway import Settings

SECTIONS: Final = {
    "Access control and TLS": ("access", "insecure", "tls_cert", "tls_key", "allow_hosts", "allow_origins"),
    "Keys for the broker": ("key_file", "broker_key"),
    "Limits": [setting.name for setting in fields(Settings) if setting.metadata],
}
"""The headings of the help, and the options under each."""


@dataclass(frozen=True)
class Serving:
    """Where a gateway listens, for whom, and within which limits."""

    bind: tuple[str, int] | None
    access: Path | None
    insecure: bool
    tls_cert: Path | None
    tls_key: Path | None
    allow_hosts: tuple[str, ...]
    allow_origins: tuple[str, ...]
    limits: dict[str, Any] = field(default_factory=dict)

    @property
    def exposed(self) -> bool:
        """Whether other machines can connect."""
        return self.bind is not None and not is_loopback(self.bind[0])

    def check(self) -> None:
        """Raise `UsageError` or `BindError` if the options contradict each other."""
        if self.tls_cert is None and self.tls_key:
            raise click.UsageError("--tls-key requires --tls-cert")
        if self.access is None and not self.insecure and self.exposed and self.bind is not None:
            raise BindError(
                f"refused to listen on {self.bind[0]}, where other machines may connect, without access control: use "
                f"--access FILE to admit known callers only, or --insecure to admit everybody"
            )

    def rules(self) -> Access | None:
        """Return the content of the access file, if there is one.  Raises `SettingError`."""
        return None if self.access is None else load(self.access)

    def settings(self) -> Settings:
        """Return the settings."""
        hosts = None
        if self.access is None and self.bind is not None and not self.exposed and "*" not in self.allow_hosts:
            hosts = frozenset({self.bind[0], *(name.lower() for name in self.allow_hosts)})
        return Settings(hosts=hosts, allow_origins=self.allow_origins, **self.limits)

    def tls(self) -> ssl.SSLContext | None:
        """Return the TLS settings, if HTTPS is to be used.  Raises `SettingError`."""
        from ..mdp.http.server import tls_context  # noqa: PLC0415 - the help does not need what it imports

        return None if self.tls_cert is None else tls_context(self.tls_cert, self.tls_key)

    def listener(self) -> socket.socket:
        """Return the socket, which listens.  Raises `BindError`."""
        return listen(*(self.bind or ("127.0.0.1", 0)))

    def warning(self) -> str:
        """Return a warning for the operator, or an empty text."""
        if self.exposed and self.access is None:
            return "--insecure: whoever can connect may call every service"
        if self.exposed and self.tls_cert is None:
            return "tokens are not encrypted without --tls-cert: put a proxy with TLS in front"
        return ""


def serving_options(*, bind: Decorator, **defaults: Any) -> Decorator:
    """Return the decorator for the options of a gateway, whose command gets `broker`, `keys` and `serving`.

    `bind` is its option `--bind`; `defaults` replace defaults of `Settings`.
    """
    names = [setting for setting in fields(Settings) if setting.metadata]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @brokers_option(
            "The broker's endpoint. Can be repeated, or separate several with commas, in order of preference."
        )
        @key_options
        @bind
        @click.option(
            "--access",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Admit only callers with a token in this access file. `mdp-gateway token` writes it.",
        )
        @click.option(
            "--insecure",
            is_flag=True,
            help="Listen on any address without --access: whoever can connect may call every service.",
        )
        @click.option(
            "--tls-cert",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="The server's certificate: use HTTPS.",
        )
        @click.option(
            "--tls-key", type=click.Path(path_type=Path), metavar="FILE", help="Its key, if it is in another file."
        )
        @click.option(
            "--allow-host",
            "allow_hosts",
            multiple=True,
            metavar="NAME",
            help="Without --access, let clients address the gateway by this name as well (the header Host), or * for "
            "any. Can be repeated.  [default: localhost and the loopback addresses]",
        )
        @click.option(
            "--allow-origin",
            "allow_origins",
            multiple=True,
            metavar="ORIGIN",
            help="Let pages of this origin (https://HOST, or * for all) use the gateway from a browser. Can be "
            "repeated.",
        )
        @options(*(limit_option(each, default=defaults.get(each.name, each.default)) for each in names))
        @wraps(command)
        def with_serving(*arguments: Any, **given: Any) -> Any:
            limits = {each.name: given.pop(each.name) for each in names}
            own = {each.name: given.pop(each.name) for each in fields(Serving) if each.name != "limits"}
            return command(*arguments, serving=Serving(**own, limits=limits), **given)

        return with_serving

    return decorate


def bind_option(default: str | None, text: str) -> Decorator:
    """Return the option `--bind`, with this default and help."""
    return click.option("--bind", type=Address(), default=default, help=text)
