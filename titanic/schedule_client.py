"""Schedules for Python programs, through the service `titanic.schedule`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ..clients import Client
from ..mdp.wire import service_name
from . import conversation
from .client import Titanic
from .schedules import SCHEDULE_OPTIONS, ScheduleOptions
from .submission import encode_options
from .typed import AnyService, body_of, name_of
from .uuids import new_uuid_hex


class Schedules:
    """Adds, lists and changes schedules.  With access control, a role sees its own; admins see all.

    All methods raise `SettingError` if an argument is invalid or there is no such schedule, `TitanicError` if Titanic
    failed, and whatever `Client.request` raises.  `owner` is for admins: whose schedule is meant, if several roles have
    one of that name.
    """

    def __init__(self, client: Client) -> None:
        self._titanic = Titanic(client)

    def add(
        self,
        name: str,
        service: AnyService,
        *frames: Any,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Submit a request for `service` again and again, from now on.  Adding the same schedule again does nothing.

        Args:
            name: The schedule's name: letters, digits or . _ : / -.
            service: The service to call: its name, or a `Service` or `Streaming`.
            frames: The body; without frames, one empty frame.  For a service with types, its value.
            headers: Headers for the service's handler, which also gets `schedule`: NAME@TIME of the occurrence.
            options: Either `cron` or `every` (seconds) is needed, all others are optional:
                `timezone`: Of `cron`, such as Europe/Berlin (default: UTC).
                `missed`: For occurrences that are over a minute late: `skip`, `once` (the default) or `all`.
                `priority`, `retries`, `backoff`, `ttl`: As for `Titanic.submit`; but `ttl` is a week by default.
        """
        encoded = encode_options(options, SCHEDULE_OPTIONS, "a schedule")
        body = body_of(service, frames) or (b"",)
        self._ask([b"add", name.encode(), service_name(name_of(service)), *body], encoded, headers)

    def ls(self) -> list[dict[str, Any]]:
        """Return the schedules by name, with their next and last occurrence and the outcome of that."""
        (answer,) = self._ask([b"ls"])
        found: list[dict[str, Any]] = json.loads(answer)
        return found

    def pause(self, name: str, *, owner: str | None = None) -> None:
        """Let a schedule submit nothing until it is resumed."""
        self._change("pause", name, owner)

    def resume(self, name: str, *, owner: str | None = None) -> None:
        """Continue a schedule that was paused, with the first occurrence from now on."""
        self._change("resume", name, owner)

    def rm(self, name: str, *, owner: str | None = None) -> None:
        """Remove a schedule.  The requests that it has submitted stay."""
        self._change("rm", name, owner)

    def run(self, name: str, *, owner: str | None = None) -> str:
        """Submit a schedule's request now, besides its occurrences, and return the UUID."""
        (uuid,) = self._change("run", name, owner, uuid=new_uuid_hex())
        return uuid.decode()

    def _change(self, action: str, name: str, owner: str | None, **options: str) -> Sequence[bytes]:
        if owner is not None:
            options["owner"] = owner
        return self._ask([action.encode(), name.encode()], options)

    def _ask(
        self,
        frames: Sequence[bytes],
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Sequence[bytes]:
        return self._titanic._perform(conversation.schedule(self._titanic.client, frames, options, headers))
