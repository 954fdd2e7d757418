"""Lifespans, in which services prepare resources before their first request and release them after the last one."""

from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack
from inspect import isasyncgenfunction, isgeneratorfunction
from typing import Any

from ...mdp.errors import SettingError
from ...mdp.program.arguments import name_of
from ..session.request import State
from .offered import Lifespan, ServiceGroup


def checked_lifespan(lifespan: Lifespan | None) -> Lifespan | None:
    """Return `lifespan`.  Raises `SettingError` if it cannot return a context manager."""
    given: Any = lifespan
    if given is not None and not callable(given):
        raise SettingError(f"lifespan is {given!r:.100}: it must be a function that returns a context manager")
    for is_kind, decorator in ((isgeneratorfunction, "contextmanager"), (isasyncgenfunction, "asynccontextmanager")):
        if is_kind(given):
            raise SettingError(f"the lifespan {name_of(given)} is a generator: decorate it with contextlib.{decorator}")
    return lifespan


class Lifespans:
    """The lifespans of a `Services` and of those that it includes, and the state that each has prepared."""

    def __init__(self, services: ServiceGroup) -> None:
        self._services = services
        self._stack = AsyncExitStack()
        self._states: dict[int, State] = {}

    def state(self, services: ServiceGroup) -> State:
        """Return the state of a group of services, which `enter` fills."""
        return self._states.setdefault(id(services), State())

    async def enter(self) -> None:
        """Enter all lifespans, outer ones first.  If one raises, leave those that were entered."""
        try:
            await self._enter(self._services, State())
        except BaseException:
            await self._stack.aclose()
            raise

    async def _enter(self, services: ServiceGroup, outer: State) -> None:
        state = self.state(services)
        state.clear()
        state.update(outer)
        if services.lifespan is not None:
            state.update(await self._entered(services.lifespan()) or {})
        for each in services.included:
            await self._enter(each, state)

    async def _entered(self, manager: Any) -> Any:
        if isinstance(manager, AbstractAsyncContextManager):
            return await self._stack.enter_async_context(manager)
        if isinstance(manager, AbstractContextManager):
            return self._stack.enter_context(manager)
        raise SettingError(
            f"the lifespan returned {manager!r:.100}, of type {name_of(type(manager))}: it must return a context "
            "manager, as a function decorated with contextlib.contextmanager or asynccontextmanager does"
        )

    async def leave(self) -> None:
        """Leave all lifespans, inner ones first."""
        await self._stack.aclose()
