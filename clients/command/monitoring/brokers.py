"""The reports of a broker about other brokers, for `mdclient brokers` and `mdclient top --all`."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Final

from ....mdp.errors import RequestError, RequestTimeout
from ...calls.reply import Reply
from ...mdclient import Client
from .top import BrokerView, duration, table, with_rates

QUESTIONS: Final = ("mmi.services", "mmi.workers", "mmi.stats", "mmi.brokers")
"""The questions to each broker."""
_LINK_COLUMNS: Final = {
    "LINK": "broker",
    "KIND": "kind",
    "ENDPOINT": "endpoint",
    "STATE": "state",
    "UP": "up",
    "SERVICES": "services",
    "THERE": "outstanding_there",
    "HERE": "outstanding_here",
    "SENT": "sent",
    "RECEIVED": "received",
    "TROUBLE": "trouble",
}
_EVERY = 1 << 30
"""More rows than any table has."""


# ── one broker ───────────────────────────────────────────────────────────────────────────────────────────────────────


def lines(answer: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer to `mmi.brokers` as lines of text: the links of the broker, and the brokers reached over them."""
    yield f"broker {answer['name']}"
    if not answer["links"]:
        yield "no links: mdp-broker --peer and --parent open them"
        return
    yield ""
    yield from table([_readable(row) for row in answer["links"]], _EVERY, _LINK_COLUMNS)
    if answer["brokers"]:
        yield ""
        yield from table(answer["brokers"], _EVERY, {"BROKER": "name", "HOPS": "hops", "OVER": "over"})
    if answer["more"]:
        yield f"… and {answer['more']} more"


def _readable(link: Mapping[str, Any]) -> dict[str, Any]:
    up = duration(link["up_seconds"]) if link["state"] in {"up", "standby"} else "-"
    texts = {name: link[name] or "-" for name in ("broker", "endpoint", "trouble")}
    return {**link, **texts, "up": up}


def summary(answer: Mapping[str, Any]) -> dict[str, str]:
    """Return an answer to `mmi.brokers` in two texts, for `mdclient info`."""
    links = (f"{link['broker'] or link['endpoint']}={link['state']}" for link in answer["links"])
    reached = (f"{each['name']}={each['hops']}" for each in answer["brokers"])
    return {"links": "  ".join(links) or "none", "hops": "  ".join(reached) or "none"}


# ── all that can be reached ──────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class BrokerReport:
    """The report of one broker, or why it could not be asked."""

    name: str
    hops: int
    over: str
    """The broker next to this one on the way to it; empty for this one."""
    trouble: str = ""
    view: BrokerView | None = None
    links: list[dict[str, Any]] = field(default_factory=list)


def ask_all(client: Client, timeout: float) -> list[BrokerReport]:
    """Ask the broker of `client`, and every broker that can be reached from it, each for at most `timeout` seconds.

    Raises `RequestError` if the client's own broker does not answer, or does not tell which others there are.
    """
    here = _decoded(client.request("mmi.brokers", timeout=timeout))
    named = [(str(here["name"]), 0, "")]
    named += [(str(each["name"]), int(each["hops"]), str(each["over"])) for each in here["brokers"]]
    asked = [[_ask(client, name, question, timeout) for question in QUESTIONS] for name, _, _ in named]
    return [
        _seen(name, hops, over, [future.result for future in futures], timeout)
        for (name, hops, over), futures in zip(named, asked, strict=True)
    ]


def _ask(client: Client, broker: str, question: str, timeout: float) -> "Future[Reply]":
    return client.submit(question, timeout=timeout, retries=0, options={"broker": broker})


def _seen(name: str, hops: int, over: str, answers: Iterable[Callable[[], Reply]], timeout: float) -> BrokerReport:
    try:
        services, workers, stats, brokers = (_decoded(answer()) for answer in answers)
    except RequestTimeout:
        return BrokerReport(name, hops, over, f"no answer within {timeout:g} s")
    except RequestError as error:
        return BrokerReport(name, hops, over, error.text or str(error))
    return BrokerReport(name, hops, over, "", BrokerView.from_answers(services, workers, stats), brokers["links"])


def _decoded(reply: Reply) -> dict[str, Any]:
    answer = b" ".join(reply)
    try:
        value = json.loads(answer)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return value
    text = f"it answered {answer.decode(errors='replace')}: it does not know links"
    raise RequestError(text, service="mmi.brokers")


def all_with_rates(seen: Iterable[BrokerReport], before: Iterable[BrokerReport]) -> dict[str, Any]:
    """Return all brokers with rates per second since `before`, ready for JSON.

    Without an earlier view, the rates are averages since each broker was started, or each link was established.
    """
    earlier = {each.name: each for each in before}
    return {"brokers": [_with_rates(each, earlier.get(each.name)) for each in seen]}


def _with_rates(seen: BrokerReport, before: BrokerReport | None) -> dict[str, Any]:
    row: dict[str, Any] = {"name": seen.name, "hops": seen.hops, "over": seen.over, "trouble": seen.trouble}
    if seen.view is None:
        return row
    then = before.view if before is not None else None
    shown = with_rates(seen.view, then)
    old = {_key(link): link for link in before.links} if before is not None else {}
    seconds = seen.view.moment - then.moment if then is not None else 0.0
    links = [_link_with_rates(link, old.get(_key(link)), seconds) for link in seen.links]
    return {**row, "links": links, "services": shown["services"], "totals": shown["totals"]}


def _key(link: Mapping[str, Any]) -> tuple[str, str]:
    return str(link["broker"]), str(link["endpoint"])


def _link_with_rates(link: Mapping[str, Any], before: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
    if before is None:
        before, seconds = {"sent": 0, "received": 0}, link["up_seconds"]
    rates = {
        f"{name}_per_second": round(max(0, link[name] - before[name]) / seconds, 1) if seconds > 0 else 0.0
        for name in ("sent", "received")
    }
    return {**link, **rates}


def all_lines(shown: Mapping[str, Any], endpoint: str, height: int) -> Iterator[str]:
    """Yield all brokers as lines of text, at most `height` of them."""
    brokers = shown["brokers"]
    asked = [broker for broker in brokers if not broker["trouble"]]
    troubled = len(brokers) - len(asked)
    yield f"{endpoint}   {len(brokers)} brokers{f', {troubled} of which cannot be asked' if troubled else ''}"
    yield ""
    rows = max(1, (height - 10) // 3)
    columns = {
        "BROKER": "name", "HOPS": "hops", "OVER": "over", "UP": "up", "WORKERS": "workers", "RUNNING": "running",
        "QUEUED": "queued", "REQUESTS/S": "requests_per_second", "TROUBLE": "trouble",
    }  # fmt: skip
    yield from table([_broker_row(broker) for broker in brokers], rows, columns)
    yield ""
    links = [{**_readable(link), "from": broker["name"]} for broker in asked for link in broker["links"]]
    columns = {
        "FROM": "from", "LINK": "broker", "KIND": "kind", "STATE": "state", "SERVICES": "services",
        "THERE": "outstanding_there", "HERE": "outstanding_here", "SENT/S": "sent_per_second",
        "RECEIVED/S": "received_per_second", "TROUBLE": "trouble",
    }  # fmt: skip
    yield from table(links, rows, columns)
    yield ""
    services = [
        {**service, "broker": broker["name"]}
        for broker in asked
        for service in broker["services"]
        if service["workers"] or service["queued"]
    ]
    services.sort(key=lambda row: (-row["queued"], row["name"], row["broker"]))
    columns = {
        "SERVICE": "name", "BROKER": "broker", "WORKERS": "workers", "IDLE": "idle", "CREDIT": "credit",
        "RUNNING": "running", "QUEUED": "queued", "REQUESTS/S": "per_second",
    }  # fmt: skip
    yield from table(services, rows, columns)


def _broker_row(broker: Mapping[str, Any]) -> dict[str, Any]:
    row = {**broker, "over": broker["over"] or "-", "trouble": broker["trouble"] or "-"}
    totals = broker.get("totals")
    if totals is None:
        return {**row, **dict.fromkeys(("up", "workers", "running", "queued", "requests_per_second"), "-")}
    return {**totals, **row, "up": duration(totals["up_seconds"])}
