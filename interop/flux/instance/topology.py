"""The tree of brokers as Flux sees it: each broker has a rank, the root has rank 0.

Links of brokers (docs/how-to/brokers.md) become edges of the tree.  If several brokers have no parent, because they are
peers, the first by name is the root, and the others count as its children.  Ranks are given breadth-first, and the
children of a broker are in order of their names.  A broker keeps its rank when it vanishes.  Those that come later get
the next.
"""

import asyncio
import json
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ....clients.aio import AsyncClient
from ....mdp.errors import ZmdpError

MAX_QUESTIONS: Final = 16
"""Maximum number of brokers that are asked at the same time."""
_UP: Final = ("up", "standby")


@dataclass(frozen=True, slots=True)
class BrokerTree:
    """The tree in the answers to `mmi.brokers`: the own broker, and the parent of each that answered."""

    own: str
    parents: Mapping[str, str | None]


class Topology:
    """The ranks, from rank 0 on.  Until the first `update`, there is one broker."""

    def __init__(self) -> None:
        self.names: list[str] = [""]
        """The broker of each rank."""
        self.alive: set[str] = {""}
        self._ranks: dict[str, int] = {"": 0}
        self._parents: list[int | None] = [None]
        self._known = False

    def update(self, seen: BrokerTree) -> None:
        """Take in the brokers of the tree."""
        order = _breadth_first(seen.parents)
        if not self._known:
            self._known = True
            self.names, self._ranks, self._parents = [], {}, []
        for name, _ in order:
            if name not in self._ranks:
                self._ranks[name] = len(self.names)
                self.names.append(name)
                self._parents.append(None)
        for name, above in order:
            rank = self._ranks[name]
            # Rank 0 stays the root.  A broker that has lost its parent stays where it was: the parent may come back.
            if rank and (above is not None or self._parents[rank] is None):
                self._parents[rank] = self._acyclic(rank, 0 if above is None else self._ranks[above])
        self.alive = set(seen.parents)

    def _acyclic(self, rank: int, above: int) -> int:
        """Return `above`, or 0 if that is below `rank`: brokers may change places while they are asked."""
        return 0 if rank in (above, *self.ancestors(above)) else above

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.names)

    def rank(self, name: str) -> int:
        """Return the rank of a broker."""
        return self._ranks[name]

    def broker(self, rank: int) -> str | None:
        """Return the broker of a rank; None if there is none, or if it cannot be reached."""
        if rank >= len(self.names) or self.names[rank] not in self.alive:
            return None
        return self.names[rank]

    def ancestors(self, rank: int) -> list[int]:
        """Return the ranks above `rank`, from its parent up to the root."""
        found = []
        above = self._parents[rank]
        while above is not None:
            found.append(above)
            above = self._parents[above]
        return found

    def level(self, rank: int) -> int:
        """Return how many ranks are above `rank`."""
        return len(self.ancestors(rank))

    @property
    def max_level(self) -> int:
        """The greatest level."""
        return max(map(self.level, range(self.size)))

    def descendants(self, rank: int) -> int:
        """Return how many ranks are below `rank`."""
        return sum(rank in self.ancestors(each) for each in range(self.size))


def _breadth_first(parents: Mapping[str, str | None]) -> list[tuple[str, str | None]]:
    """Return every broker, with the one above it, in the order of their ranks."""
    children: dict[str | None, list[str]] = {}
    for name in sorted(parents):
        above = parents[name]
        children.setdefault(above if above in parents else None, []).append(name)
    order: list[tuple[str, str | None]] = []
    found: set[str] = set()
    roots = children.get(None) or [min(parents)]  # no root: brokers that report each other as parents
    todo: deque[tuple[str, str | None]] = deque([(roots[0], None)])
    todo.extend((each, roots[0]) for each in roots[1:])
    while todo:
        name, above = todo.popleft()
        if name not in found:
            found.add(name)
            order.append((name, above))
            todo.extend((each, name) for each in children.get(name, ()))
    return order + [(name, roots[0]) for name in sorted(parents.keys() - found)]


def parent_of(answer: Mapping[str, Any]) -> str | None:
    """Return the parent of the broker whose answer to `mmi.brokers` this is, or None."""
    up = [link["broker"] for link in answer["links"] if link["kind"] == "parent" and link["state"] in _UP]
    return min(up, default=None)


async def ask(client: AsyncClient, timeout: float) -> BrokerTree:
    """Ask every broker that can be reached for its links.  Raises `ZmdpError` if the own broker does not answer."""
    own = json.loads((await client.request("mmi.brokers", timeout=timeout))[0])
    parents: dict[str, str | None] = {own["name"]: parent_of(own)}
    slots = asyncio.Semaphore(MAX_QUESTIONS)

    async def ask_one(name: str) -> None:
        async with slots:
            try:
                reply = await client.request("mmi.brokers", timeout=timeout, options={"broker": name})
            except ZmdpError:
                return  # it cannot be reached any more
        parents[name] = parent_of(json.loads(reply[0]))

    await asyncio.gather(*(ask_one(each["name"]) for each in own["brokers"]))
    return BrokerTree(own["name"], parents)
