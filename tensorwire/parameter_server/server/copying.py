"""Copies a shard to a new backup, some rows at a time, while it goes on changing."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final

from tensorwire.parameter_server.decisions.records import StartCopy
from tensorwire.parameter_server.decisions.views import Server
from tensorwire.parameter_server.messaging.messages import CopyPiece, Install, Message
from tensorwire.parameter_server.server.shard import ShardServer
from tensorwire.parameter_server.storage.table import Rows

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.node import Node
    from tensorwire.parameter_server.server.parts import Copied, FrozenShard

_PIECE: Final = 1 << 15

Name = tuple[int, int, str]
"""Names a copy: the shard, a number, and who makes it."""


class Copies:
    """The copies that one server makes, and those that are made to it.

    Args:
        node: the server.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._numbers = itertools.count()
        self._incoming: dict[Name, dict[str, list[Rows]]] = {}

    # --- to here

    def take(self, piece: CopyPiece) -> bool:
        """Takes some rows of a copy."""
        ids, columns = piece.rows
        rows = Rows(ids, dict(columns))
        self._incoming.setdefault(piece.copy, {}).setdefault(piece.table, []).append(rows)
        return True

    def taken(self, copy: Name) -> dict[str, list[Rows]]:
        """All rows of a copy."""
        return self._incoming.pop(copy, {})

    def forget(self, server: Server) -> None:
        """Forgets the copy of a server that is gone in its middle."""
        for name in [name for name in self._incoming if name[2] == str(server)]:
            del self._incoming[name]

    # --- from here

    def begin(self, shard: ShardServer, effect: StartCopy) -> None:
        """Remembers the state as it is now, and sends it from a thread of its own."""
        state = shard.state
        frozen, rest = state.freeze(), state.copied()
        self._node.host.start(lambda: self._send(shard, effect, frozen, rest))

    def _send(
        self, shard: ShardServer, effect: StartCopy, frozen: FrozenShard, rest: Copied
    ) -> None:
        name = (shard.replica.shard, next(self._numbers), str(self._node.me))
        try:
            arrived = self._send_rows(shard, effect, name, frozen) and self._ask(
                effect.heir,
                Install(name, name[0], effect.position, effect.version, effect.state, rest),
            )
        finally:
            with shard.lane.state_lock:
                shard.state.thaw(frozen)
        with self._node.acting():
            self._node.copied(shard, effect, arrived is True)

    def _send_rows(
        self, shard: ShardServer, effect: StartCopy, name: Name, frozen: FrozenShard
    ) -> bool:
        for table, each in frozen.tables.items():
            while True:
                with shard.lane.state_lock:
                    rows = each.next_piece(_PIECE)
                if rows is None:
                    break
                piece = CopyPiece(name, effect.version, table, (rows.ids, rows.columns))
                if self._ask(effect.heir, piece) is not True:
                    return False
        return True

    def _ask(self, to: Server, message: Message) -> object:
        answer: Future[object] = Future()
        self._node.peers.caller.call(to, message, answer.set_result)
        return answer.result()
