"""Services as their workers describe them, and a form with which admins try one."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from ...mdp.errors import ZmdpError
from ...mdp.services import About, Description
from ...mdp.services.examples import example
from ...mdp.services.submission import show_defaults
from .. import AsyncClient, Reply
from ..stubs import types
from ..values import body_for, readable
from .formats import link
from .observer import Observer, Unavailable

TIMEOUT_SECONDS: Final = 10.0
"""How long a service may take that is tried."""
MAX_PARTS: Final = 100
"""Parts of a stream that are shown; the rest is cancelled."""
MAX_SHOWN: Final = 64 << 10
"""Characters of a reply that are shown."""
MAX_KEPT: Final = 50
"""Outcomes that are kept to be shown."""


@dataclass(frozen=True)
class Described:
    """What some workers say of a service, as it is shown."""

    about: About
    types: str
    submission: str


@dataclass(frozen=True)
class TrialResult:
    """What came of a trial: the reply, or why there is none."""

    text: str
    failed: bool


class Trials:
    """Asks what services take, and calls them for admins.  `client` may make requests on behalf of these."""

    def __init__(self, observer: Observer, client: AsyncClient) -> None:
        self._observer = observer
        self._client = client
        self._results: dict[str, TrialResult] = {}

    async def described(self, service: str) -> list[Described]:
        """Return what the workers of a service say of it, first what most of them say."""
        try:
            answer = await self._observer.ask("mmi.describe", service.encode(errors="replace"))
        except Unavailable:
            return []
        abouts = [About.read(each["about"], each["workers"]) for each in answer["abouts"]] if answer != 404 else []
        return [
            Described(each, types(Description(service, each.workers, (each,))), show_defaults(each.submission))
            for each in abouts
        ]

    def result(self, number: str) -> TrialResult | None:
        """Return the result of that number, unless it is forgotten."""
        return self._results.get(number)

    async def run(self, fields: Mapping[str, str]) -> str:
        """Call the service of a form, and return where the result is shown."""
        service = fields.get("service", "")
        number = secrets.token_hex(8)
        try:
            result = TrialResult(await self._call(service, fields), failed=False)
        except ZmdpError as error:
            result = TrialResult(_shown(str(error)), failed=True)
        if len(self._results) >= MAX_KEPT:
            del self._results[next(iter(self._results))]
        self._results[number] = result
        return link("/service", name=service, tried=number) + "#about"

    async def _call(self, service: str, fields: Mapping[str, str]) -> str:
        described = await self.described(service)
        about = described[0].about if described else About()
        typed = fields.get("body", "").replace("\r\n", "\n").encode(errors="replace")
        options = {"on_behalf": fields["visitor"]} if fields["visitor"] else None
        parts = self._client.stream(
            service, *body_for(about, [typed]), deadline=TIMEOUT_SECONDS, wait=False, options=options
        )
        shown: list[str] = []
        async for part in parts:
            shown.append(_text_of(about, part))
            if len(shown) >= MAX_PARTS or sum(map(len, shown)) > MAX_SHOWN:
                shown.append("…")
                break
        await parts.aclose()
        return "\n".join(shown)


def beginning(described: list[Described]) -> str:
    """Return what the form contains at first."""
    if not described or not described[0].about.codec:
        return ""
    value: Any = example(described[0].about.request)
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def _text_of(about: About, part: Reply) -> str:
    texts = []
    for frame in readable(about, part):
        text = bytes(frame)
        if about.codec:
            with suppress(msgspec.DecodeError):
                text = msgspec.json.format(text, indent=2)
        try:
            texts.append(_shown(text.decode()))
        except UnicodeDecodeError:
            texts.append(f"{len(text)} bytes that are not text")
    return "\n".join(texts)


def _shown(text: str) -> str:
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in text[:MAX_SHOWN])
