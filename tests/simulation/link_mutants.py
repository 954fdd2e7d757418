"""Faulty replacements for what links brokers, and what the simulation of several brokers must report for each."""

from typing import Any

from zmdp.mdp import wire
from zmdp.mdp.broker.core.admission import Admission
from zmdp.mdp.broker.core.outgoing import Outgoing
from zmdp.mdp.broker.core.records import Client, Remote
from zmdp.mdp.broker.core.requests import Requests
from zmdp.mdp.broker.core.roles import Role
from zmdp.mdp.broker.federation.announcements import Announcements
from zmdp.mdp.broker.federation.link import Link, LinkRemote
from zmdp.mdp.broker.federation.link_dialog import NOT_PLACED, LinkDialog
from zmdp.mdp.broker.federation.links import Links

_options_for_link = wire.options_for_link

# ── where requests go ────────────────────────────────────────────────────────────────────────────────────────────────


def send_back(remote: LinkRemote, request: Any) -> bool:
    """A request is sent back to where it came from."""
    return True


def unsigned_way(given: wire.Options, via: tuple[str, ...], name: str, attempts: int, dialect: str) -> bytes:
    """A broker does not tell that a request has passed it."""
    return _options_for_link(given, (), via[0] if via else name, attempts, dialect)


def farthest(remote: Remote, other: Remote) -> bool:
    """A request goes over the most links."""
    return remote.hops > other.hops


def anywhere(admission: Admission, request: Any) -> bool:
    """A request that is addressed to a broker is done by another."""
    return False


def role_of_the_link(dialog: LinkDialog, request: Any, name: str | None) -> tuple[None, Role]:
    """A request that was passed on is on behalf of the broker that passed it on."""
    role = request.client.role
    if role.restricted:
        request.options = wire.signed(request.options, role.signature)
    return None, role


# ── how requests end ─────────────────────────────────────────────────────────────────────────────────────────────────


def forget_lost(links: Links, *args: Any, take_down: Any = Links.take_down) -> tuple[list[Any], list[Any]]:
    """The requests at another broker are lost with the link."""
    return [], take_down(links, *args)[1]


def take_for_another(
    dialog: LinkDialog, link: Link, command: Any, now: float, answered: Any = LinkDialog._answered_by
) -> None:
    """A late or forged reply is taken for that to another request, at whichever broker that is."""
    others = {number: each for each in dialog.links.by_identity.values() for number in each.attempts}
    if others and command.id not in link.attempts and isinstance(command, wire.Reply):
        command.id, link = next(iter(others.items()))
    answered(dialog, link, command, now)


def place_streams_again(outgoing: Outgoing, request: Any, *rest: Any, reply: Any = Outgoing.reply) -> None:
    """A request is placed again though a PARTIAL of it has passed."""
    reply(outgoing, request, *rest)
    if request.attempt is not None and isinstance(request.attempt.worker, Remote):
        request.attempt.streamed = False


def keep_to_itself(requests: Requests, request: Any, reason: Any, now: float, drop: Any = Requests.drop) -> None:
    """CANCEL is not passed on."""
    if request.attempt is not None and isinstance(request.attempt.worker, Remote):
        requests.finish(request, reason, now)
    else:
        drop(requests, request, reason, now)


def do_not_cancel(requests: Requests, client: Client, number: int, now: float, cancel: Any = Requests.cancel) -> bool:
    """A broker ignores CANCEL from another."""
    known: bool = client.is_broker or cancel(requests, client, number, now)
    return known


def swallow(dialog: LinkDialog, request: Any, attempt: Any, reason: Any) -> bool:
    """A request that cannot be done is not returned."""
    return bool(request.client.is_broker and reason in NOT_PLACED)


# ── what is announced ────────────────────────────────────────────────────────────────────────────────────────────────


def never_withdraw(
    announcements: Announcements, link: Link, name: bytes, *args: Any, announce: Any = Announcements._announce
) -> bool:
    """A service that is gone is announced still."""
    return not announcements._offer(link, name)[2] or announce(announcements, link, name, *args)


def announce_once(announcements: Announcements, service: Any) -> None:
    """What changes is not announced."""


def silent(links: Links, now: float, read_until: float) -> list[Link]:
    """Nobody notices that a link is silent, and no heartbeats are sent."""
    links._plan()
    return []


def never_again(links: Links, link: Link, now: float, begin: Any = Links._open) -> None:
    """A link that has ended is not opened again."""
    if not link.trouble:
        begin(links, link, now)


def alone(link: Link, other: Link) -> bool:
    """What is reached over one link is announced over no other."""
    return False


LINK_MUTANTS = [
    ("mesh5", LinkRemote, "may_take", send_back, "C44"),
    ("tree", wire, "options_for_link", unsigned_way, "C44"),
    ("tree", Remote, "precedes", farthest, "is served by"),
    ("mesh2", Admission, "_address", anywhere, "is served by"),
    ("mesh2", LinkDialog, "_authorise_passed", role_of_the_link, "is on behalf of"),
    ("mesh2", Links, "take_down", forget_lost, "a count is not 0"),
    ("mesh2", LinkDialog, "_answered_by", take_for_another, "C18"),
    ("tree", Outgoing, "reply", place_streams_again, "C17"),
    ("mesh2", Requests, "drop", keep_to_itself, "does not cancel"),
    ("mesh2", Requests, "cancel", do_not_cancel, "does not end"),
    ("tree", LinkDialog, "hand_back", swallow, "C44"),
    ("tree", Announcements, "_announce", never_withdraw, "can still be reached"),
    ("mesh2", Announcements, "changed", announce_once, "can still be reached"),
    ("mesh2", Links, "tick", silent, "time stands still"),
    ("mesh2", Links, "_open", never_again, "time stands still"),
    ("tree", Link, "joins", alone, "not served though all is well"),
]
"""Topology, class or module, name, replacement, and text that the failure must contain."""

FIRST_SEEDS = {anywhere: 2, forget_lost: 10, place_streams_again: 12, role_of_the_link: 8, take_for_another: 7}
"""The first seed that finds each of those that few seeds find.  If it no longer does, the search only takes longer."""
