"""Decides by which view of a cluster a newcomer may act, given the one it read in the store.

A store may belong to somebody else, who can put an old view back, or delete it. Whoever has read a
later one goes on with that; a worker that has just come remembers nothing. So before it acts on a
view it asks the servers that are named there, by whichever life has their names now, for the view
that they know. One server that knows the cluster is enough. If all are gone, or know nothing of the
cluster, as they have just come themselves, the view stays as it was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from tensorwire.parameter_server.decisions import views
from tensorwire.parameter_server.decisions.views import Server, View


def named_in(view: View, latest: Callable[[str], int]) -> set[Server]:
    """The servers that may know more of a cluster than a view that was read.

    Args:
        view: the view.
        latest: tells the incarnation of the latest life of a name that was heard of.
    """
    lives = views.servers_of(view)
    names = {each.name for each in lives} | set(view.settings.get("servers", ()))
    return lives | {Server(name, latest(name)) for name in names}


class Confirmation:
    """A newcomer's knowledge of a cluster.

    Args:
        read: the view in the store; None if there is none.

    Attributes:
        view: the latest view that it knows of; None for none.
        is_confirmed: a server has told the view that it knows.
        waiting: servers that were asked, and have neither answered nor gone.
        unheard: servers that are to be asked once more, as calls met the lives before them.
    """

    def __init__(self, read: View | None) -> None:
        self.view = read
        self.is_confirmed = False
        self.waiting: set[Server] = set()
        self.unheard: set[Server] = set()
        self._asked: set[Server] = set()

    def to_ask(self, lives: Iterable[Server]) -> list[Server]:
        """The servers to ask now, given those that may know more; nobody need answer twice.

        When all have answered and none has confirmed anything, others may have come meanwhile.
        """
        if self.is_confirmed or self.waiting:
            return []
        self.waiting = set(lives) - (self._asked - self.unheard)
        self._asked |= self.waiting
        self.unheard.clear()
        return sorted(self.waiting)

    def missed(self, server: Server) -> None:
        """Notes a call that failed because it met the life before, of the same name.

        News of this one may have come meanwhile, or are still to come.
        """
        self.waiting.discard(server)
        self.unheard.add(server)

    def answered(self, server: Server, known: View | None) -> None:
        """Takes the view that a server knows; None if it knows none, or is gone."""
        self.waiting.discard(server)
        if known is None:
            return
        self.is_confirmed = True
        self.waiting.clear()
        self.unheard.clear()
        if self.view is None or known.number > self.view.number:
            self.view = known
