"""The services that `Services.service` makes of functions, and the groups in which they are declared."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from functools import update_wrapper
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from ...mdp.errors import CodecError, SettingError
from ...mdp.program.arguments import underlying
from ...mdp.service_limits import Limit
from ...mdp.services import About, BaseService, Service, Streaming
from ...mdp.services.schedule import checked_schedule
from ...mdp.services.submission import SubmissionDefaults
from ...mdp.services.tool import Tool, checked_tool
from ..session.request import Request
from .signature import Signature

In = TypeVar("In", contravariant=True)  # noqa: PLC0105 - shown in type checkers' messages
Out = TypeVar("Out", covariant=True)  # noqa: PLC0105 - as above
Function = TypeVar("Function", bound=Callable[..., Any])

CallNext = Callable[[Request], Any]
"""Takes a request, and returns a handler's result, or a coroutine of it."""
Middleware = Callable[[Request, CallNext], Any]
"""Called with each request and with what comes next (`handlers.py`)."""
Lifespan = Callable[[], AbstractContextManager[Mapping[str, Any] | None] | AbstractAsyncContextManager[Any]]
"""Prepares what services need before their first request, and releases it after the last one (`lifespan.py`)."""

MAX_DESCRIPTION: Final = 4000
"""Characters of a docstring that callers are told."""


class ServiceSettings(SubmissionDefaults, total=False):
    """Settings of a service, or defaults for all services of a `Services`.

    `codec` is `"json"` (the default) or `"msgpack"`.  `version` is what callers are told.  `concurrency`,
    `handler_timeout`, `limit` and `per_group` are as for `Worker` and `AsyncWorker`.  With `every`, in seconds or such
    as `"5m"`, or `cron`, such as `"30 2 * * MON-FRI"` in a `timezone` such as `Europe/Berlin`, a Titanic submits
    requests without a value to the service (docs/how-to/schedules.md).  With `tool`, true or a `Tool`, agents may call
    it (docs/how-to/agents.md).  The others are for submissions to Titanic: see
    `SubmissionDefaults`.
    """

    codec: str
    version: str
    concurrency: int | None
    handler_timeout: float | None
    limit: Limit | None
    per_group: Limit | None
    every: float | str | None
    cron: str | None
    timezone: str | None
    tool: bool | Tool | None


class ServiceGroup:
    """Services that are declared together, with one lifespan and middleware, and other groups that are included.

    `Services` is one: it declares them.
    """

    def __init__(self, prefix: str, lifespan: Lifespan | None, middleware: Sequence[Middleware]) -> None:
        self.prefix = prefix
        self.lifespan = lifespan
        self.middleware = list(middleware)
        self.included: list[ServiceGroup] = []
        """Other groups, which are offered too."""
        self._own: list[AnyOffered] = []
        self._parent: ServiceGroup | None = None

    def __iter__(self) -> "Iterator[AnyOffered]":
        """Yield the services, with those of all that are included."""
        yield from self._own
        for each in self.included:
            yield from each

    def include(self, other: "ServiceGroup", *, prefix: str = "") -> None:
        """Offer the services of `other` too, within this lifespan and middleware.

            services.include(accounts, prefix="v2.")

        Args:
            other: The services.
            prefix: Comes before their names.

        Raises:
            SettingError: A name was declared before, or `other` is included already.
        """
        if other is self or other._parent is not None:
            raise SettingError("these services are included already: declare them once, and include them once")
        for each in other:
            self._root._check_new(prefix + each.name)
        for each in other:
            each.name = prefix + each.name
        other._add_prefix(prefix)
        other._parent = self
        self.included.append(other)

    def _add(self, offered: "AnyOffered") -> None:
        self._root._check_new(offered.name)
        self._own.append(offered)

    def _add_prefix(self, prefix: str) -> None:
        self.prefix = prefix + self.prefix
        for each in self.included:
            each._add_prefix(prefix)

    @property
    def _root(self) -> "ServiceGroup":
        return self if self._parent is None else self._parent._root

    def _check_new(self, name: str) -> None:
        if any(each.name == name for each in self):
            raise SettingError(f"service {name!r} was declared before")

    def around(self) -> "list[ServiceGroup]":
        """Return this and those in which it is included.

            outermost, *_ = accounts.around()

        Returns:
            All of them, the outermost first.
        """
        return [*(self._parent.around() if self._parent else ()), self]


class _Offered(BaseService[In, Out], Generic[In, Out, Function]):
    """A service with the function that handles its requests."""

    def __init__(
        self,
        name: str | bytes,
        function: Function,
        signature: Signature,
        group: ServiceGroup,
        settings: ServiceSettings,
        batch: tuple[int, float] | None = None,
    ) -> None:
        super().__init__(
            name, signature.request, signature.reply, codec=settings.get("codec", "json"),
            retries=settings.get("retries"), backoff=settings.get("backoff"), ttl=settings.get("ttl"),
            priority=settings.get("priority"),
        )  # fmt: skip
        self.schedule = checked_schedule(settings)
        """When Titanic submits requests to it: `every`, or `cron` and `timezone`."""
        if self.schedule:
            self._check_no_value()
        self.tool = checked_tool(settings.get("tool"))
        """What agents are told; None if it is not meant for them."""
        self.function = function
        self.signature = signature
        self.settings = settings
        self.group = group
        """The `Services` in which it was declared."""
        self.batch = batch
        """How many requests a batch has, and how many seconds it waits for them; None if the function takes single
        values."""
        self.runs_async = signature.asynchronous or batch is not None
        """Whether an event loop handles the requests."""
        update_wrapper(self, function, updated=())  # its attributes may have the names of ours

    def _check_no_value(self) -> None:
        try:
            self.request.decode([b""])
        except CodecError as error:
            raise SettingError(f"a service with a schedule gets no value, which its function needs: {error}") from None

    def about(self) -> About:
        """Return the description for callers: version, docstring and types of the function, and options for Titanic.

            resize.about().request                                  # the JSON schema of Resize

        Returns:
            What `Client.describe` returns of its workers.
        """
        request, reply = self.request.schema(), self.reply.schema()
        return About(
            version=self.settings.get("version", ""),
            description=(inspect.getdoc(underlying(self.function)) or "")[:MAX_DESCRIPTION],
            codec=self.request.codec,
            request=request,
            reply=None if self.signature.streaming else reply,
            part=reply if self.signature.streaming else None,
            submission=self.submission,
            schedule=self.schedule,
            tool=self.tool,
            argument="" if self.tool is None else self.signature.argument,
        )

    if TYPE_CHECKING:
        __call__: Function
    else:

        def __call__(self, *arguments, **named):
            """Call the function itself."""
            return self.function(*arguments, **named)


class OfferedService(_Offered[In, Out, Function], Service[In, Out], Generic[In, Out, Function]):
    """A function that is offered as a service.

    `Services.service` makes it; nobody else needs to.

        size = resize(Resize("a.png", 80))                      # calls the function
        size = client.call(resize, Resize("a.png", 80))         # calls the service

    Args:
        name: The service's name.
        function: The function.
        signature: Its types.
        group: The `Services` in which it was declared.
        settings: Its settings.
        batch: For a function of batches: how many requests, and how many seconds to wait for them.
    """


class OfferedStreaming(_Offered[In, Out, Function], Streaming[In, Out], Generic[In, Out, Function]):
    """A generator function that is offered as a service.

    `Services.service` makes it; nobody else needs to.

        names = list(find("cat"))                               # calls the function
        names = list(client.stream(find, "cat"))                # calls the service

    Args:
        name: The service's name.
        function: The function.
        signature: Its types.
        group: The `Services` in which it was declared.
        settings: Its settings.
        batch: For a function of batches: how many requests, and how many seconds to wait for them.
    """


AnyOffered = OfferedService[Any, Any, Any] | OfferedStreaming[Any, Any, Any]
