"""Decides with the servers whether all of them have room for a push, before any part of it is sent.

A server that has no room for its part of a push must not let the others take theirs. With each
answer to a push a server tells how much room it has left. A push that is small beside that is sent
at once; before any other, all servers are asked to keep room for their parts. If one cannot,
nothing is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.servers import Servers
from tensorwire.parameter_server.client.splitting import RowGradients, Split
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.declarations.spec import row_bytes
from tensorwire.parameter_server.messaging import messages

_MARGIN: Final = 16
"""Pushes of each trainer that may be on their way while an answer comes, and as many more."""

Parted = Callable[[RowGradients, View], Split]


class Room:
    """The room that the servers of one cluster have for rows of one trainer's pushes.

    Args:
        servers: whom to ask.
        view: returns the latest view.
    """

    def __init__(self, servers: Servers, view: Callable[[], View]) -> None:
        self._servers = servers
        self._view = view
        self._told: dict[tuple[int, Server], int] = {}

    def told(self, shard: int, head: Server, room: int) -> None:
        """Notes how many bytes a server has left."""
        self._told[shard, head] = room

    def refusal(
        self, trainer: int, number: int, tables: Sequence[RowGradients], parted: Parted
    ) -> errors.OutOfMemoryError | None:
        """The reason for which a push cannot be sent; None if all servers have room for it.

        Args:
            trainer: who pushes.
            number: of the push.
            tables: the gradients.
            parted: divides them among the shards.
        """
        if not tables or len(self._view().active) == 1 or self._is_plenty(tables):
            return None

        def wanted(shard: int) -> messages.Reserve:
            return messages.Reserve(
                shard, trainer, number, _rows(tables, self._view(), shard, parted)
            )

        answers = self._servers.ask_heads(wanted)
        full = [answer.text for answer in answers if isinstance(answer, messages.Full)]
        return errors.OutOfMemoryError(f"nothing was taken: {full[0]}") if full else None

    def _is_plenty(self, tables: Sequence[RowGradients]) -> bool:
        view = self._view()
        most = sum(len(each.rows.ids) * row_bytes(each.spec) for each in tables)
        wanted = most * _MARGIN * max(1, len(view.trainers))
        shards = [view.shard(number) for number in view.active]
        heads = [(shard.number, shard.head) for shard in shards if shard and shard.chain]
        return len(heads) == len(shards) and all(self._told.get(h, -1) >= wanted for h in heads)


def _rows(tables: Sequence[RowGradients], view: View, shard: int, parted: Parted) -> dict[str, int]:
    """The number of rows of each table in a shard's part."""
    counts: dict[str, int] = {}
    for each in tables:
        part = parted(each, view).parts.get(shard)
        if part is not None:  # else the map has changed, and all are asked again
            counts.update(zip(part[1].tables, part[1].sizes, strict=True))
    return counts
