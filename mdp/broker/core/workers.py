"""The dialog with workers, from READY until a worker is forgotten (C6 to C17)."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NoReturn

from ... import wire
from ...timers import NEVER, Timers
from ...wire import Message, Reason, batch
from .drops import Drop
from .endings import Endings
from .journal import WORKER_LINES, Loss, Refusal
from .outgoing import WorkerForgotten
from .records import Attempt, Service, Worker, key_of
from .requests import Requests
from .roles import Role
from .state import Part, State

BROKER_CODES: Final = {403, 404, 413, 429, 502, 503}
"""Codes that a client attributes to the broker, unless the ERROR has a detail."""
FINISHED_BY_OVERSIZED: Final = frozenset({wire.WX1, wire.WSP})
"""Headers of workers that are done with a request after a FINAL over the limits; others may still send one that fits
(C15).  A Simple Pirate cannot, before it is given another request."""
MAX_MISADDRESSED: Final = 100
"""Replies in a row to addresses that this broker cannot have given, after which a worker is sent away (C18)."""


class _Disconnected(Exception):
    """Raised when the sender was sent DISCONNECT: the rest of its message is ignored."""


class WorkerDialog(Part):
    """The dialog of one broker with its workers."""

    def __init__(self, state: State, requests: Requests, endings: Endings) -> None:
        super().__init__(state)
        self._requests = requests
        self._endings = endings
        self._beat_resolution = state.limits.heartbeat / 20
        self.beats: Timers[Worker] = Timers(self._beat_resolution)
        """When a worker is to be sent a HEARTBEAT, or is dead."""
        self._registered = 0
        """Number of workers that have registered so far."""
        self._on: Final[dict[type, Callable[[Any, Role, float], None]]] = {
            wire.Error: self._error,
            wire.Oversized: self._oversized,
            wire.Heartbeat: self._heartbeat,
            wire.Ready: self._ready,
            wire.Credit: self._credit,
            wire.Release: self._release,
            wire.Disconnect: self._disconnect,
            wire.Invalid: self._invalid,
        }

    # ── commands of workers ──────────────────────────────────────────────────────────────────────────────────────────

    def receive(self, command: Any, role: Role, now: float) -> None:
        """Take in a command of a worker whose key has that role."""
        try:  # noqa: SIM105 - `suppress` takes longer
            self._receive(command, role, now)
        except _Disconnected:
            pass

    def receive_batch(self, message: Message, found: wire.Batched, role: Role, now: float) -> None:
        """Take in an X1 message of a worker (C43)."""
        if found.bare:
            self.receive(wire.Heartbeat(found.route, found.header), role, now)
            return
        try:
            for command in batch.from_worker(message, found.at, found.route, self._max_message, self._max_frames):
                self._receive(command, role, now)
        except _Disconnected:
            return
        worker = self._worker(found.route, role)
        if worker is not None:
            worker.last_seen = now  # even if nothing in it was valid

    def _receive(self, command: Any, role: Role, now: float) -> None:
        if isinstance(command, wire.Reply):  # the most frequent one
            self._reply(command, role, now)
        else:
            self._on[type(command)](command, role, now)

    def _worker(self, route: wire.Route, role: Role) -> Worker | None:
        """Return the registered worker that sent the current message, unless it belongs to another role (C45)."""
        worker = self._directory.workers.get(key_of(route))
        return worker if worker is not None and worker.role is role else None

    def _is_foreign(self, command: Any, role: Role) -> bool:
        """Return whether `command` is about a worker of another role; it is ignored and counted then (C45)."""
        worker = self._directory.workers.get(key_of(command.route))
        if worker is None or worker.role is role:
            return False
        self._stats.other_role += 1
        return True

    def _ready(self, command: wire.Ready, role: Role, now: float) -> None:
        directory, limits = self._directory, self._limits
        if self._is_foreign(command, role):
            return
        if self._worker(command.route, role) is not None:
            self._unexpected(command, Refusal.SECOND_READY, role, now)
        elif command.service.startswith(wire.MMI):
            self._unexpected(command, Refusal.RESERVED_NAME, role, now)
        elif len(directory.workers) >= limits.max_workers:
            self._unexpected(command, Refusal.TOO_MANY_WORKERS, role, now)
        elif not role.may_offer(command.service):
            self._unexpected(command, Refusal.NOT_ALLOWED, role, now, command.service)
        elif command.service not in directory.services and not self._make_room(now):
            self._unexpected(command, Refusal.TOO_MANY_SERVICES, role, now)
        elif self._state.draining and command.header == wire.WX1:
            self._refuse(command.route, command.header, Refusal.DRAINING, role, now)
            raise _Disconnected
        else:
            self._registered += 1
            service = directory.service(command.service)
            # Third-party workers reconnect as soon as they get DISCONNECT, so `_beat` sends it only after an interval.
            credit = 0 if self._state.draining else min(command.credit, limits.max_credit)
            worker = Worker(
                command.route, command.header, service, role, credit=credit, id=self._registered, now=now
            )  # fmt: skip
            worker.name, worker.host = command.name, command.host
            worker.pid, worker.version = command.pid, command.version
            worker.dialect = command.dialect
            worker.limits = command.limits
            directory.add_worker(worker, now, command.about)
            self._compare_limits(service, now)
            if worker.header == wire.WX1:  # HEARTBEAT, or a REQUEST before it, says at once that READY was accepted
                worker.last_sent -= limits.heartbeat
            self.beats.set(worker, worker.last_sent + limits.heartbeat)
            dialect = wire.DIALECTS[worker.header]
            text = "worker %s offers %s, credit %d (%s)"
            self._state.journal.note(
                now, logging.INFO, "worker-ready", text, str(worker), service.name, credit, dialect,
                lines=WORKER_LINES, fields=worker.fields,
            )  # fmt: skip

    def _compare_limits(self, service: Service, now: float) -> None:
        """Warn if the workers of a service declare different limits."""
        declared = service.declared
        if declared and declared.get(next(iter(declared))) != service.available:
            self._state.journal.note(
                now, logging.WARNING, "limits-differ",
                "workers of service %s declare different limits: the strictest hold: %s",
                service.name, str(service.schedule.limits),
            )  # fmt: skip

    def _make_room(self, now: float) -> bool:
        """Return whether there is room for one more service.  One that only has waiting requests makes way (C41)."""
        directory = self._directory
        if len(directory.services) < self._limits.max_services:
            return True
        service = directory.newest_unserved()
        if service is None:
            return False
        directory.forget(service)
        self._endings.service(service, Drop.TOO_MANY_SERVICES, now)
        return True

    def _credit(self, command: wire.Credit, role: Role, now: float) -> None:
        worker = self._seen(command, role, now)
        if worker is not None:
            self._directory.set_credit(worker, min(command.credit, self._limits.max_credit))

    def _release(self, command: wire.Release, role: Role, now: float) -> None:
        attempt = self._attempt(command, role, now)
        if attempt is None:
            return
        self._registry.hand_back(attempt)
        if not attempt.abandoned:
            self._requests.place_again(attempt, now)

    def _reply(self, command: wire.Reply, role: Role, now: float) -> None:
        attempt = self._attempt(command, role, now)
        if attempt is not None:
            self._requests.replied(attempt, command, now)

    def _error(self, command: wire.Error, role: Role, now: float) -> None:
        attempt = self._attempt(command, role, now)
        if attempt is None:
            return
        detail = command.detail
        if not detail and command.code in BROKER_CODES:
            detail = [b""]  # so that the client does not attribute it to the broker
        self._registry.release(attempt)
        self._requests.ended_by(attempt, command.code, command.text, detail, now)

    def _oversized(self, command: wire.Oversized, role: Role, now: float) -> None:
        """Count a reply over the limits as invalid, and drop its request, whose reply is incomplete."""
        self._state.count_invalid(command.reason, now)
        if self._is_foreign(command, role):
            return
        worker = self._worker(command.route, role)
        if worker is None and command.header == wire.WSP:
            self._ready_again(command, role, now)
        if worker is None or worker.header != command.header:
            return
        attempt = worker.held.get(command.id)
        if attempt is None:
            return
        request = attempt.request
        if command.kind is not wire.PARTIAL and worker.header in FINISHED_BY_OVERSIZED:
            worker.last_seen = now
            self._registry.release(attempt)
            if not attempt.abandoned:
                self._requests.finish(request, Drop.REPLY_TOO_LARGE, now, attempt)
            return
        if command.kind is wire.PARTIAL or request.header == wire.CX1:
            self._requests.drop(request, Drop.REPLY_TOO_LARGE, now)
        if command.kind is not wire.PARTIAL:
            worker.oversized_reply_at = now  # it may still send one that fits (C15); if not, `tick` ends it

    def _heartbeat(self, command: wire.Heartbeat, role: Role, now: float) -> None:
        self._stats.heartbeats += 1
        self._seen(command, role, now)

    def _disconnect(self, command: wire.Disconnect, role: Role, now: float) -> None:
        # C10: at any time, even before READY.
        worker = None if self._is_foreign(command, role) else self._worker(command.route, role)
        if worker is None:
            return
        if worker.header != wire.WX1:
            self._lose([(worker, Loss.DISCONNECTED)], now)  # C16: nothing else is sent to it
        elif not worker.leaving:
            worker.last_seen = now
            worker.gives_up = command.text
            self._directory.leave(worker)
            if not worker.service.available:
                self._endings.no_wait(worker.service, now)
            if not worker.held:
                self._left(worker, now)

    def _left(self, worker: Worker, now: float) -> None:
        """Answer the DISCONNECT of a worker that is leaving and no longer holds any request."""
        if self._directory.workers.get(worker.key) is worker:  # else it was lost in the same turn
            self._outgoing.say(worker, wire.disconnect(worker.route, worker.header))
            self._lose([(worker, Loss.DISCONNECTED)], now)

    def _attempt(self, command: wire.Reply | wire.Error | wire.Release, role: Role, now: float) -> Attempt | None:
        """Return the attempt that `command` is about; None if there is none (C14, C18, C32)."""
        worker = self._seen(command, role, now)
        if worker is None:
            return None
        address = command.id
        attempt = worker.held.get(address)
        if attempt is not None:
            return attempt
        if isinstance(address, int):
            if self._state.first_address <= address < self._requests.next_address:
                self._stats.late += 1  # C32: late or duplicated; it matches no live request
                return None
        elif worker.misaddressed < MAX_MISADDRESSED:
            worker.misaddressed += 1
            self._state.count_invalid(Reason.BAD_ADDRESS, now)  # C18: it cannot be an address of this broker
            return None
        return self._unexpected(command, Refusal.WRONG_CLIENT if worker.held else Refusal.NO_REQUEST, role, now)

    def _seen(self, command: Any, role: Role, now: float) -> Worker | None:
        """Return the registered worker that sent `command`, a sign of life (C13); disconnect any other peer (C14)."""
        worker = self._directory.workers.get(key_of(command.route))
        if worker is None:
            if command.header == wire.WSP:
                self._ready_again(command, role, now)
                return None
            self._unexpected(command, Refusal.NOT_REGISTERED, role, now)
        if worker.role is not role:
            self._stats.other_role += 1  # C45
            return None
        if worker.header != command.header:
            self._unexpected(command, Refusal.WRONG_DIALECT, role, now)
        worker.last_seen = now
        return worker

    def _ready_again(self, command: wire.Reply | wire.Oversized, role: Role, now: float) -> None:
        """Register a Simple Pirate that was given up: its late reply says that it waits for the next request."""
        self._stats.late += 1
        self._ready(wire.Ready(command.route, command.header, command.service), role, now)

    def _unexpected(self, command: Any, reason: Refusal, role: Role, now: float, service: bytes = b"") -> NoReturn:
        """Disconnect and forget a peer that sent a valid but unexpected command (C14).  Raises `_Disconnected`."""
        self._expel(command.route, command.header, reason, role, now, service)
        raise _Disconnected

    def _expel(self, route: wire.Route, header: bytes, reason: Refusal, role: Role, now: float, service: bytes) -> None:
        """Disconnect a peer, and forget it if it is a registered worker."""
        worker = self._directory.workers.get(key_of(route))
        if worker is not None:
            self._outgoing.close_batch(worker)
        self._refuse(route, header, reason, role, now, service)
        if worker is not None:
            self._lose([(worker, Loss.REFUSED)], now)

    def _refuse(
        self, route: wire.Route, header: bytes, reason: Refusal, role: Role, now: float, service: bytes = b""
    ) -> None:
        self._stats.disconnected[reason] += 1
        level, text, details, why = logging.WARNING, "disconnected a worker: %s", reason.value, ""
        if reason is Refusal.NOT_REGISTERED:  # the worker registers again
            level, text = logging.INFO, "asked a worker to register again, as after a restart of the broker: %s"
        elif reason is Refusal.DRAINING:
            level, text = logging.INFO, "sent a new worker away: %s"
        elif reason is Refusal.NOT_ALLOWED:
            details = f"role {role.name} may not offer {wire.show(service)!r}: the broker's access file decides"
            if header == wire.WX1:  # the other dialects have no text
                why = details
        self._state.journal.note(now, level, f"disconnect-{reason}", text, details)
        if farewell := wire.disconnect(route, header, why.encode()):
            self._outgoing.add(farewell)

    def _invalid(self, command: wire.Invalid, role: Role, now: float) -> None:
        del role
        self._state.count_invalid(command.reason, now)

    # ── the time ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def tick(self, now: float) -> None:
        """Send heartbeats, and lose workers that are silent."""
        read_until = self._state.read_until
        lost: list[tuple[Worker, Loss]] = []
        for worker in self.beats.pop_due(now):
            oversized_reply_at = worker.oversized_reply_at
            if read_until >= worker.last_seen + self._patience(worker):
                lost.append((worker, Loss.SILENT))
            elif (
                oversized_reply_at is not None
                and worker.held
                and read_until >= oversized_reply_at + self._limits.patience
            ):
                for attempt in list(worker.held.values()):
                    self._requests.drop(attempt.request, Drop.REPLY_TOO_LARGE, now)
                self._refuse(worker.route, worker.header, Refusal.OVERSIZED_REPLY, worker.role, now)
                lost.append((worker, Loss.REFUSED))
            else:
                self._beat(worker, now)
        self._lose(lost, now)

    def probe(self, identity: bytes, now: float) -> None:
        """Send a HEARTBEAT to the workers behind that routing id."""
        for worker in self._directory.workers_at(identity):
            self._send_heartbeat(worker, now)

    def _send_heartbeat(self, worker: Worker, now: float) -> None:
        worker.told(now)
        if beat := wire.heartbeat(worker.route, worker.header):
            self._outgoing.say(worker, beat)

    # ── the end of workers ───────────────────────────────────────────────────────────────────────────────────────────

    def disconnected(self, identity: bytes, turn: int) -> None:
        """Record that the workers behind that routing id have received nothing of `turn` and since."""
        for worker in self._directory.workers_at(identity):
            worker.unreached_from = turn

    def lose(self, identity: bytes, now: float) -> None:
        """Lose the workers behind that routing id, which are no longer connected."""
        self._lose([(worker, Loss.UNREACHABLE) for worker in self._directory.workers_at(identity)], now)

    def revoke(self, now: float) -> None:
        """Disconnect the workers whose roles may no longer offer their services."""
        for worker in list(self._directory.workers.values()):
            if not worker.role.may_offer(worker.service.name):
                name = worker.service.name
                self._expel(worker.route, worker.header, Refusal.NOT_ALLOWED, worker.role, now, name)

    def dismiss_finished(self, now: float) -> None:
        """Answer the workers that are leaving, and in this turn finished the last request that they held."""
        finished = self._registry.finished
        while finished:
            self._left(finished.pop(0), now)

    def dismiss_idle(self, service: Service, now: float) -> None:
        """Send away the workers of `service` that hold nothing, to another broker: no request waits for them."""
        while (worker := service.schedule.idle_worker()) is not None:
            self._dismiss(worker, now)

    def _dismiss(self, worker: Worker, now: float) -> None:
        """Send away a worker that has nothing left to do."""
        if farewell := wire.disconnect(worker.route, worker.header):
            self._outgoing.say(worker, farewell)
        self._forget(worker, Loss.CLOSING, now)

    def drop_and_dismiss(self, worker: Worker, now: float) -> Iterator[None]:
        """Send away a worker because the broker closes, after dropping the requests that it holds, one at a time."""
        yield from self._endings.drop_held(worker.held.values())
        if self._directory.workers.get(worker.key) is worker:
            self._dismiss(worker, now)
        yield

    def _patience(self, worker: Worker) -> float:
        """Return the seconds of silence after which a worker is dead.

        Busy workers that do not speak X1 may be silent for longer (C34), and Simple Pirates that are idle for ever.
        """
        if worker.header == wire.WSP and not worker.held:
            return NEVER
        if worker.held and worker.header != wire.WX1:
            return max(self._limits.patience, self._limits.busy_grace)
        return self._limits.patience

    def _beat(self, worker: Worker, now: float) -> None:
        """Send a HEARTBEAT if nothing was sent for an interval, whether the worker is busy or not (C13)."""
        beats = worker.last_sent + self._limits.heartbeat
        if now >= beats and self._state.draining and not (worker.credit or worker.held):
            self._dismiss(worker, now)
            return
        if now >= beats:
            self._send_heartbeat(worker, now)
            beats = now + self._limits.heartbeat
        due = min(beats, worker.last_seen + self._patience(worker))
        # A time in the past means that it may have sent something which the broker has not read yet.  The next look is
        # later than now: timers round, and `tick` would go on with workers that are due again already.
        self.beats.set(worker, max(due, now + self._beat_resolution))

    def _lose(self, lost: Iterable[tuple[Worker, Loss]], now: float) -> None:
        """Forget workers; the requests that they held go to the front of the queue, and to other workers (C17)."""
        # All workers are forgotten first, so that no request is given to the next one of them.
        attempts = [attempt for worker, reason in lost for attempt in self._forget(worker, reason, now)]
        for attempt in reversed(attempts):  # each goes to the front
            if not attempt.abandoned:
                self._requests.place_again(attempt, now)

    def _forget(self, worker: Worker, reason: Loss, now: float) -> list[Attempt]:
        """Forget a worker; return the requests that it held, which must be placed again or dropped."""
        self._stats.lost[reason] += 1
        self.beats.clear(worker)
        self._outgoing.ask(WorkerForgotten(worker.route, self._state.turn))
        attempts = self._registry.remove_worker(worker, now, silent=reason is Loss.SILENT)
        level = logging.INFO if reason in {Loss.DISCONNECTED, Loss.CLOSING} else logging.WARNING
        text = "worker %s of service %s is gone: %s"
        self._state.journal.note(
            now, level, f"worker-{reason}", text, str(worker), worker.service.name, reason,
            lines=WORKER_LINES, fields=worker.fields,
        )  # fmt: skip
        if not worker.service.available:
            self._endings.no_wait(worker.service, now)
        return attempts
