"""Calls to the other servers of a cluster, and this server's word on which of them are lost.

The node's lock is held wherever this is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from tensorwire.parameter_server.decisions import lives
from tensorwire.parameter_server.decisions.lives import Fate, Lives, Verdict
from tensorwire.parameter_server.decisions.records import NotHead
from tensorwire.parameter_server.decisions.views import Server, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, Caller, latest_life

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.node import Node
    from tensorwire.parameter_server.server.shard import Call


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """A call to another server."""

    to: Server
    message: messages.Message
    then: Callable[[object], object]


class Peers:
    """The other servers of a cluster, as one server sees them.

    Args:
        node: the server.

    Attributes:
        caller: makes the calls.
        lives: says which lives are over.
    """

    def __init__(self, node: Node) -> None:
        worker = node.host.worker
        self.caller = Caller(worker, node.cluster)
        self.lives = Lives[_Outgoing](lambda name: latest_life(worker, name))
        self._node = node
        self._polls: list[tuple[Call, int, frozenset[Server]]] = []
        """Calls that ask for a vote, the numbers of their views, and the suspects."""

    # --- calls

    def call(self, to: Server, message: messages.Message, then: Callable[[object], object]) -> None:
        """Calls another server; ``then`` gets the answer, or ``LOST``, with the lock held."""
        call = _Outgoing(to, message, then)
        self._node.later(lambda: self._send(call))

    def _send(self, call: _Outgoing) -> None:
        was_heard_of = self.lives.verdict(call.to) is not Verdict.UNHEARD

        def answered(answer: object) -> None:
            if self._node.is_closed:
                return
            with self._node.acting():
                if answer is LOST:
                    self._failed(call, was_heard_of)
                elif isinstance(answer, messages.Outdated):
                    self._node.see(View.decode(answer.view))
                    call.then(NotHead())
                else:
                    call.then(answer)

        self.caller.call(call.to, call.message, answered)

    def _failed(self, call: _Outgoing, was_heard_of: bool) -> None:
        fate = self.lives.failed(call.to, call, was_heard_of)
        if fate is Fate.AGAIN:
            self._node.later(lambda: self._send(call))
        elif fate is Fate.GIVEN_UP:
            call.then(LOST)
        else:
            self.trust(call.to)

    # --- lives

    def trust(self, server: Server) -> None:
        """Takes a life of which nothing was heard for living, but not for ever."""
        if self.lives.trust(server):
            doubt = partial(self._node.host.after, lives.TRUST, partial(self._doubt, server))
            self._node.later(doubt)

    def _doubt(self, server: Server) -> None:
        if self.lives.doubt(server):
            self._node.heard_lost(server)

    def lost(self, server: Server) -> None:
        """Gives up the calls to a life that is over."""
        for call in self.lives.lost(server):
            call.then(LOST)

    def came(self, server: Server) -> None:
        """Takes note of a life that was heard of, and of the ends of those before it."""
        news = self.lives.came(server)
        for former in news.over:
            self._node.heard_lost(former)
        for call in news.again:
            self._node.later(partial(self._send, call))

    # --- votes

    def polled(self, call: Call, view: View, suspects: frozenset[Server]) -> None:
        """Votes once the suspects are lost to this server, too; looks if they are."""
        self._polls.append((call, view.number, suspects))
        self.vote()
        for suspect in suspects:
            if self.lives.verdict(suspect) is not Verdict.OVER:
                self.trust(suspect)
                self._node.later(partial(self.caller.look_for, suspect))

    def vote(self) -> None:
        """Answers the polls about which this server has heard enough."""
        waiting, self._polls = self._polls, []
        view = self._node.view
        for call, number, suspects in waiting:
            if view is not None and view.number > number:
                call.answer(messages.Outdated(view.encode()))
            elif all(self.lives.verdict(each) is Verdict.OVER for each in suspects):
                call.answer(True)
            else:
                self._polls.append((call, number, suspects))

    def end(self) -> None:
        """Turns away those who wait for a vote."""
        polls, self._polls = self._polls, []
        for call, _, _ in polls:
            call.answer(NotHead())
