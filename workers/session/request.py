"""The request that a handler gets."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from ...mdp import wire


class State(dict[str, Any]):
    """The state that the lifespan of services yields for their handlers: a mapping, whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the lifespan has yielded no {name!r}") from None


class Request(list[bytes]):
    """A request: the list of its body frames, with its metadata as attributes.

        def greet(request):
            return b"%s, %s" % (request[0], request.headers["user"].encode())

    `service` is the name of the requested service.  `deadline` is the value of `time.monotonic()` at which the request
    expires, or None.  `cancelled` becomes True when the reply is no longer wanted: the client has cancelled the request
    or is gone, the deadline has passed, or the connection was lost.  Long-running handlers should check it from time to
    time, and return early.

    Args:
        frames: The body.
        service: The name of the service.
        client: The client's address.
        options: The options that the client sent.
        deadline: When it expires.
        attempt: How often it was tried before.
    """

    __slots__ = ("_attempt", "_options", "_state", "_values", "address", "cancelled", "deadline", "service")

    def __init__(
        self,
        frames: Iterable[bytes],
        *,
        service: str,
        client: wire.Address,
        options: wire.Options = wire.NO_OPTIONS,
        deadline: float | None = None,
        attempt: int = 0,
    ) -> None:
        list.__init__(self, frames)  # super() costs a request 1 % more
        self.service = service
        self.address = client
        self.deadline = deadline
        self.cancelled = False
        self._options = options
        self._values: dict[str, Any] | None = None
        self._attempt = attempt

    @property
    def body(self) -> list[bytes]:
        """The body frames: this list itself."""
        return self

    @property
    def client(self) -> bytes:
        """The client's address, as the broker sent it."""
        return wire.frame_of(self.address)

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that the client sent, read-only."""
        return MappingProxyType(self.options.get("headers", {}))

    @property
    def options(self) -> Mapping[str, Any]:
        """All options that the client sent, including those defined by the service, read-only."""
        if self._values is None:
            self._values = self._options.values()
        return MappingProxyType(self._values)

    @property
    def user(self) -> str:
        """The role that makes the request, or on whose behalf it is made; empty if the broker has no access control.

        Clients cannot choose it: the broker removes what they send as `user` or `admin` and writes its own.
        """
        user = self.options.get("user", "") if self._options.raw else ""
        return user if isinstance(user, str) else ""

    @property
    def admin(self) -> bool:
        """Whether that role may administer what belongs to others; false if the broker has no access control."""
        return self._options.raw != b"" and self.options.get("admin") is True

    def may_manage(self, owner: str) -> bool:
        """Return whether the sender is `owner` or an admin.  Anyone may manage what has no owner.

            if not request.may_manage(job.owner):
                raise ServiceError(403, "this is somebody else's")

        Args:
            owner: The role that owns something; empty if nobody does.

        Returns:
            Whether the sender may manage it.
        """
        return not owner or self.admin or self.user == owner

    @property
    def state(self) -> State:
        """What the lifespan of its `Services` has yielded; empty for a worker without one."""
        return getattr(self, "_state", None) or State()

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    @property
    def attempt(self) -> int:
        """1, plus the number of workers that were lost while they held this request."""
        return self._attempt or 1
