"""All attacks, and what each needs of the broker."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from . import connections, messages

Run = Callable[[str, int, Random], None]
"""An attack: `(endpoint, amount, rng)`.  `amount` is roughly the number of messages that it sends."""


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
    Attack(connections.a_million_frames),
    Attack(connections.a_message_without_end),
    Attack(connections.next_routing_ids),
    Attack(messages.tiny_frames),
    Attack(messages.large_waiting_requests),
    Attack(messages.large_requests_at_once),
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
    Attack(messages.malformed_batches),
    Attack(messages.options_bombs),
    Attack(messages.ready_flood, shuts_out=True),
    Attack(messages.reconnecting_workers),
    Attack(messages.silent_workers),
    Attack(messages.cancel_storm),
    Attack(messages.short_lives),
    Attack(messages.requests_for_the_canary),
    Attack(messages.memory_used_up),
    Attack(messages.waiting_requests, broker=("--max-request-bytes", str(1 << 30)), drained=True),
    # Attacks with keys (an unknown key, a revoked one, a wrong role) come here, with `broker=("--access", …)`.
]
ATTACKS: Final = {attack.name: attack for attack in _ALL}
