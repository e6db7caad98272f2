"""Sends rows that moved to the shards that keep them from now on, until those say they have them.

The node's lock is held wherever this is called, except where it says otherwise.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from tensorwire.parameter_server.decisions.records import Import, NotHead
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.node import Node
    from tensorwire.parameter_server.server.parts import Moved


class Exports:
    """The rows on their way from the shards of one server.

    Args:
        node: the server.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._under_way: set[tuple[int, int, int]] = set()
        """The shard, the target and the epoch of what has no answer yet."""

    def send(self, number: int) -> None:
        """Sends what a shard has to send, if this server is its head, and not what is under way."""
        shard = self._node.shards.get(number)
        if shard is None or not shard.replica.is_head:
            return
        for (target, epoch), moved in list(shard.state.exports.items()):
            self._send_to(target, epoch, number, moved)

    def _send_to(self, target: int, epoch: int, number: int, moved: Moved) -> None:
        node, key = self._node, (number, target, epoch)
        keeper = None if node.view is None else node.view.shard(target)
        if keeper is None or not keeper.chain or key in self._under_way:
            return
        self._under_way.add(key)
        rows = Import(number, epoch, moved, moved.accounts)
        bring = messages.Bring(target, node.shards[number].replica.version, rows)

        def answered(answer: object) -> None:
            self._under_way.discard(key)
            shard = node.shards.get(number)
            if shard is None:
                return
            if answer is LOST or isinstance(answer, NotHead):
                node.try_again(partial(self._send_again, number))
            else:
                node.carry_out(number, shard.replica.exported(target, epoch))

        node.peers.call(keeper.head, bring, answered)

    def _send_again(self, number: int) -> None:
        """Sends what was not taken. Called without the lock."""
        with self._node.acting():
            self.send(number)
