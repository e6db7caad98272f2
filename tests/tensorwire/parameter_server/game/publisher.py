"""A trainer that publishes versions in a game: each must equal a snapshot of its cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorwire.parameter_server.decisions import orders
from tensorwire.parameter_server.decisions.orders import Extent
from tensorwire.parameter_server.decisions.tasks import Reply
from tensorwire.parameter_server.decisions.views import Client
from tests.tensorwire.parameter_server.game.plans import Broken

if TYPE_CHECKING:
    from tests.tensorwire.parameter_server.game.cluster import Game

_ASKER = Client("admin", 0)
_FULL_DISK = 0.3
_VERSIONS_OF_A_CHAIN = 6


@dataclass(frozen=True)
class Part:
    """The part of a version that one shard wrote in a game.

    Args:
        rows: by id, those that it wrote.
        every: all rows that the shard had at the cut.
    """

    rows: Mapping[int, float]
    every: Mapping[int, float]


class Publisher:
    """Takes versions, and puts them together as a reader does.

    Attributes:
        checked: how many bases and deltas were compared.
    """

    def __init__(self, game: Game) -> None:
        self._game = game
        self._since: orders.Since | None = None
        self._has: dict[int, float] = {}
        self._is_busy = False
        self._taken_count = 0
        self.checked = {Extent.ALL: 0, Extent.CHANGES: 0}

    def take(self) -> None:
        """Has a version taken; whatever fails is in the next one."""
        if self._is_busy:
            return
        self._is_busy = True
        self._taken_count += 1
        if self._taken_count % _VERSIONS_OF_A_CHAIN == 0:
            self._stop()
        extent = Extent.ALL if self._since is None else Extent.CHANGES
        version = orders.Version(self._chain, extent, False)

        def answered(answer: Any) -> None:
            self._is_busy = False
            if isinstance(answer, Reply):
                self._taken(extent, answer.result)

        self._ask(orders.TakeVersion(version, "chain/draft", _ASKER, self._since), answered)

    @property
    def _chain(self) -> str:
        return f"chain {self._taken_count // _VERSIONS_OF_A_CHAIN}"

    def _stop(self) -> None:
        """Ends a chain, and begins another one; shards may hear of it in either order."""
        ended = f"chain {self._taken_count // _VERSIONS_OF_A_CHAIN - 1}"
        self._since = None
        self._ask(orders.EndPublishing(ended), lambda _: None)

    def _taken(self, extent: Extent, taken: orders.VersionTaken | None) -> None:
        if taken is None:  # only a base can follow
            self._since = None
            return
        parts: list[Part] = [written.files["part"] for written in taken.parts]  # type: ignore[misc]
        found = {} if extent is Extent.ALL else dict(self._has)
        wanted: dict[int, float] = {}
        for part in parts:
            found |= part.rows
            wanted |= part.every
        if found != wanted:
            raise Broken(f"a version of {extent} gives {found}, not {wanted}")
        self.checked[extent] += 1
        if self._game.random.random() < _FULL_DISK:
            return
        self._has, self._since = found, taken.since
        self._ask(orders.Commit(taken.at, taken.since), lambda _: None)

    def _ask(self, what: Any, answered: Any) -> None:
        self._game.admin.call(self._game.view.coordinator, ("request", what), answered)
