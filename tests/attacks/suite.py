"""All attacks, and what each needs of the broker."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Final

from . import below, within

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
    Attack(below.garbage_bytes),
    Attack(below.impossible_frames),
    Attack(below.half_handshakes),
    Attack(below.many_connections),
    Attack(below.beyond_the_descriptors, descriptors=300, shuts_out=True),
    Attack(below.connections_that_come_and_go),
    Attack(below.slow_loris),
    Attack(below.a_million_frames),
    Attack(below.a_message_without_end),
    Attack(below.next_routing_ids),
    Attack(within.tiny_frames),
    Attack(within.large_waiting_requests),
    Attack(within.large_held_requests),
    Attack(within.envelopes),
    Attack(within.streams_not_read),
    Attack(within.requests_not_read),
    Attack(within.collected_partials),
    Attack(within.oversized_messages),
    Attack(within.mmi_flood),
    Attack(within.heartbeats_not_read),
    Attack(within.unknown_services),
    Attack(within.ids_of_departed_clients),
    Attack(within.ids_of_departed_workers),
    Attack(within.stolen_addresses),
    Attack(within.mutated_messages),
    Attack(within.malformed_batches),
    Attack(within.options_bombs),
    Attack(within.ready_flood, shuts_out=True),
    Attack(within.reconnecting_workers),
    Attack(within.silent_workers),
    Attack(within.cancel_storm),
    Attack(within.short_lives),
    Attack(within.waiting_requests, broker=("--max-queued-bytes", str(1 << 30), "--max-queue", "1000000"), drained=True),
    # Attacks with keys (an unknown key, a revoked one, a wrong role) come here, with `broker=("--access", …)`.
]
ATTACKS: Final = {attack.name: attack for attack in _ALL}
