"""Schedules for Python programs, through the service `titanic.schedule`."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ...clients import Client
from ...mdp.wire import service_name
from .client import Titanic, _completed
from .schedules import SCHEDULE_OPTIONS, ScheduleOptions
from .steps import ServiceOrName, body_of, name_of, options_of
from .submission import encode_options, new_uuid


class Schedules:
    """Adds, lists and changes schedules.  With access control, a role sees its own; admins see all.

        with Client() as client:
            schedules = Schedules(client)
            schedules.add("nightly", "report", b"all", cron="30 2 * * *", timezone="Europe/Berlin")
            for schedule in schedules.ls():
                print(schedule["name"], schedule["next"])

    Args:
        client: Its connection, and its key, are used.

    Raises:
        SettingError: `client` is something else.
    """

    def __init__(self, client: Client) -> None:
        self._conversation = Titanic(client)._conversation

    def add(
        self,
        name: str,
        service: ServiceOrName,
        *frames: Any,
        headers: Mapping[str, str] | None = None,
        **options: Unpack[ScheduleOptions],
    ) -> None:
        """Submit a request for `service` again and again, from now on.  Adding the same schedule again does nothing.

            schedules.add("tick", "shout", b"tick", every=300, missed="skip", retries=3)

        Args:
            name: The schedule's name: letters, digits or . _ : / -.
            service: The service to call: its name, or a `Service` or `Streaming`.
            frames: The body; without frames, one empty frame.  For a service with types, its value.
            headers: Headers for the service's handler, which also gets `schedule`: NAME@TIME of the occurrence.
            cron: When to submit a request, as in a crontab, such as `30 2 * * MON-FRI`.  Either this or `every` is
                needed.
            every: Interval in seconds at which to submit a request.
            timezone: Of `cron`, such as Europe/Berlin (default: UTC).
            missed: What to do about occurrences that are over a minute late: `skip` them, submit one request for them
                (`once`, the default), or submit `all`.
            priority: 0 to 9; 9 runs first (default: the service's, or 0).
            group: Whose turns and limits apply to the requests, for example a tenant's.
            retries: How often Titanic retries it if the handler fails (default: the service's, or 0).
            backoff: Pause in seconds before the first retry, doubled for each further one (default: the service's,
                or 1).
            ttl: How long to keep the results, in seconds (default: the service's, or a week).

        Raises:
            SettingError: An argument is invalid, or there is another schedule of this name.
            TitanicError: Titanic failed.
            RequestError: As from `Client.request`.
        """
        encoded = encode_options(options_of(service, options), SCHEDULE_OPTIONS, "a schedule")
        body = body_of(service, frames) or (b"",)
        self._ask([b"add", _encoded(name), service_name(name_of(service)), *body], encoded, headers)

    def ls(self) -> list[dict[str, Any]]:
        """Return the schedules by name, with their next and last occurrence and the outcome of that.

            paused = [schedule["name"] for schedule in schedules.ls() if schedule["paused"]]

        Returns:
            What `titanic schedule ls --json` prints of each.

        Raises:
            TitanicError: Titanic failed.
            RequestError: As from `Client.request`.
        """
        (answer,) = self._ask([b"ls"])
        found: list[dict[str, Any]] = json.loads(answer)
        return found

    def pause(self, name: str, *, owner: str | None = None) -> None:
        """Let a schedule submit nothing until it is resumed.

            schedules.pause("nightly")

        Args:
            name: The schedule's name.
            owner: For admins: whose schedule is meant, if several roles have one of this name.

        Raises:
            SettingError: There is no such schedule.
            TitanicError: Titanic failed.
            RequestError: As from `Client.request`.
        """
        self._change("pause", name, owner)

    def resume(self, name: str, *, owner: str | None = None) -> None:
        """Continue a schedule that was paused, with the first occurrence from now on.

            schedules.resume("nightly")

        Args:
            name: The schedule's name.
            owner: For admins: whose schedule is meant, if several roles have one of this name.

        Raises:
            SettingError: There is no such schedule.
            TitanicError: Titanic failed.
            RequestError: As from `Client.request`.
        """
        self._change("resume", name, owner)

    def rm(self, name: str, *, owner: str | None = None) -> None:
        """Remove a schedule.

            schedules.rm("nightly")

        The requests that it has submitted stay.

        Args:
            name: The schedule's name.
            owner: For admins: whose schedule is meant, if several roles have one of this name.

        Raises:
            SettingError: There is no such schedule.
            TitanicError: Titanic failed.
            RequestError: As from `Client.request`.
        """
        self._change("rm", name, owner)

    def run(self, name: str, *, owner: str | None = None) -> str:
        """Submit a schedule's request now, besides its occurrences.

            uuid = schedules.run("nightly")

        Args:
            name: The schedule's name.
            owner: For admins: whose schedule is meant, if several roles have one of this name.

        Returns:
            The request's UUID.

        Raises:
            SettingError: There is no such schedule.
            TitanicError: Titanic failed.
            RequestError: As from `Client.request`.
        """
        (uuid,) = self._change("run", name, owner, uuid=new_uuid().hex)
        return uuid.decode()

    def _change(self, action: str, name: str, owner: str | None, **options: str) -> Sequence[bytes]:
        if owner is not None:
            options["owner"] = owner
        return self._ask([action.encode(), _encoded(name)], options)

    def _ask(
        self,
        frames: Sequence[bytes],
        options: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Sequence[bytes]:
        return _completed(self._conversation.schedule(frames, options, headers))


def _encoded(name: str) -> bytes:
    """Return the frame of a name.  What cannot be encoded is replaced by a sign that Titanic refuses."""
    return name.encode(errors="replace")
