"""All attacks, and what each needs of the broker."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from . import connections, keyed, messages, web

Run = Callable[..., None]
"""An attack: `(endpoint, amount, rng)`, and the folder of keys if its broker has access control.

`amount` is roughly the number of messages that it sends.
"""


@dataclass(frozen=True)
class Attack:
    """An attack, which runs in a process of its own."""

    run: Run
    broker: tuple[str, ...] = ()
    """Options of its broker, beside those of every broker."""
    descriptors: int | None = None
    """How many descriptors its broker may have open."""
    shuts_out: bool = False
    """It may keep newcomers away while it lasts, but not afterwards."""
    drained: bool = False
    """At its height the broker gets SIGTERM, and its end is timed."""
    roles: str = ""
    """The roles in the broker's access file, beside the canary's; each has a key of its name.  Without any, the broker
    has no access control."""
    target: str = "broker"
    """What is attacked: the broker, the gateway, or the dashboard."""
    options: tuple[str, ...] = ()
    """Options of the gateway."""
    memory: int = 512 << 20
    """How much memory the gateway or the dashboard may use for clients."""

    @property
    def name(self) -> str:
        return self.run.__name__.replace("_", "-")


_ALL: Final = [
    Attack(connections.garbage_bytes),
    Attack(connections.impossible_frames),
    Attack(connections.half_handshakes),
    Attack(connections.many_connections),
    Attack(connections.beyond_the_descriptors, descriptors=300, shuts_out=True),
    Attack(connections.connections_that_come_and_go),
    Attack(connections.slow_loris),
    Attack(connections.next_routing_ids),
    Attack(messages.tiny_frames),
    Attack(messages.large_waiting_requests),
    Attack(messages.large_held_requests),
    Attack(messages.envelopes),
    Attack(messages.streams_not_read),
    Attack(messages.requests_not_read),
    Attack(messages.collected_partials),
    Attack(messages.oversized_messages),
    Attack(messages.mmi_flood),
    Attack(messages.heartbeats_not_read),
    Attack(messages.unknown_services),
    Attack(messages.ids_of_connected_clients),
    Attack(messages.ids_of_departed_clients),
    Attack(messages.ids_of_departed_workers),
    Attack(messages.stolen_addresses),
    Attack(messages.mutated_messages),
    Attack(messages.options_bombs),
    Attack(messages.ready_flood, shuts_out=True),
    Attack(messages.reconnecting_workers),
    Attack(messages.silent_workers),
    Attack(messages.cancel_storm),
    Attack(messages.short_lives),
    Attack(messages.requests_for_the_canary),
    Attack(messages.memory_used_up),
    Attack(messages.waiting_requests, broker=("--max-request-bytes", str(1 << 30)), drained=True),
    Attack(keyed.unknown_keys, roles=keyed.ROLES),
    Attack(keyed.replayed_handshakes, roles=keyed.ROLES),
    Attack(keyed.garbled_handshakes, roles=keyed.ROLES),
    Attack(keyed.what_is_not_allowed, roles=keyed.ROLES),
    Attack(keyed.others_requests, roles=keyed.ROLES),
    Attack(keyed.routing_ids_of_other_roles, roles=keyed.ROLES),
    Attack(keyed.limits_of_a_role, roles=keyed.ROLES),
    Attack(web.idle_connections, target="gateway"),
    Attack(web.slow_bodies, target="gateway"),
    Attack(web.replies_that_are_not_read, target="gateway"),
    Attack(web.names_of_no_service, target="gateway"),
    Attack(web.endless_headers, target="gateway"),
    Attack(web.idle_connections_at_the_dashboard, target="dashboard"),
    Attack(web.streams_of_the_dashboard, target="dashboard"),
]
ATTACKS: Final = {attack.name: attack for attack in _ALL}
