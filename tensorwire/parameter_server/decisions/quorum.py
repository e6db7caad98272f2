"""Decides whether enough servers of a cluster agree that others are lost for these to be given up.

A server that was stopped, or is cut off, sees others silent, or is refused by them. If it could act
on that alone, it would give up state that is there. So whoever takes servers or trainers out of a
view asks all who are named there for their votes, and acts only if so many agree that no others can
decide otherwise. A server votes once it has heard of these losses itself. A vote counts only for
what it was asked for, so whoever sleeps meanwhile acts on nothing that it heard before.

The *voters* are the servers that the view names, without those whose end is certain: their process
has ended, or a later life has their name. A majority of them is enough for everything. If exactly
half of them agree, as one of two, the trainers decide: a majority of them must agree, too. So of
two servers that take each other for lost, that one stays which the trainers reach. While there are
no trainers half is enough to take out servers of whose shards each has another.
"""

from __future__ import annotations

from collections.abc import Collection

from tensorwire.parameter_server.decisions import views
from tensorwire.parameter_server.decisions.views import Server, View


class Electorate:
    """Those whose votes count in one view.

    Args:
        view: the view.
        over: servers whose end is certain.
        suspects: servers and trainers that may be taken out of it.
    """

    def __init__(self, view: View, over: Collection[Server], suspects: Collection[Server]) -> None:
        named = [*view.servers, *sorted(views.keepers(view) - set(view.servers))]
        clients = [Server(t.client.name, t.client.incarnation) for t in view.trainers]
        self._may_do_without_trainers = not view.joined and not self._gives_up_state(
            view, over, suspects
        )
        self.servers = tuple(each for each in named if each not in over)
        self.trainers = tuple(each for each in clients if each not in suspects)

    def is_enough(self, agreeing: Collection[Server]) -> bool:
        """True if those who agree may take out those who are suspected."""
        share = self._share(agreeing)
        if share > 0 or not self.servers:
            return True
        trainers = [each for each in self.trainers if each in agreeing]
        are_most = 2 * len(trainers) > len(self.trainers)
        return share == 0 and (are_most or self._may_do_without_trainers)

    def to_ask(self, agreeing: Collection[Server]) -> tuple[Server, ...]:
        """Those whose votes are needed: of the trainers only while they decide."""
        return (*self.servers, *self.trainers) if self._share(agreeing) == 0 else self.servers

    def _share(self, agreeing: Collection[Server]) -> int:
        """Positive for a majority of the servers, 0 for half of them."""
        votes = [each for each in self.servers if each in agreeing]
        return 2 * len(votes) - len(self.servers)

    @staticmethod
    def _gives_up_state(view: View, over: Collection[Server], suspects: Collection[Server]) -> bool:
        gone = {*over, *suspects}
        return any(gone.issuperset(shard.chain) for shard in view.shards)
