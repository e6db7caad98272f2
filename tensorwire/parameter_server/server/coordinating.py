"""Runs the coordinator, at the one server that coordinates."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

import rpc
from tensorwire.parameter_server.decisions import orders, tasks, views
from tensorwire.parameter_server.decisions.coordination import Coordinator
from tensorwire.parameter_server.decisions.lives import Verdict
from tensorwire.parameter_server.decisions.records import NotHead
from tensorwire.parameter_server.decisions.views import Server, Snapshot, View
from tensorwire.parameter_server.messaging import messages
from tensorwire.parameter_server.messaging.calling import LOST, latest_life
from tensorwire.parameter_server.messaging.settings import Meeting
from tensorwire.parameter_server.server.drafts import Drafts, Refused, examine
from tensorwire.parameter_server.server.shard import Call

if TYPE_CHECKING:
    from tensorwire.parameter_server.server.node import Node

_logger: Final = logging.getLogger("tensorwire")
_SECONDS_BETWEEN_LOOKS: Final = 0.02
_SECONDS_BETWEEN_POLLS: Final = 0.05
_SECONDS_AFTER_AN_ERROR: Final = 1.0


class Coordinating:
    """The coordinator of one cluster, if it is this server.

    Args:
        node: the server.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._coordinator: Coordinator | None = None
        self._requests: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._drafts = Drafts()
        self._meeting = Meeting(node.host.worker)
        self._closed = False
        self._is_undecided = False

    def close(self) -> None:
        """Ends it; requests go to another server."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        """Coordinates no longer; requests go to another server."""
        self._coordinator = None
        self._is_undecided = False
        self._reject_all()
        for call in self._drafts.close():
            self._node.later(partial(call.answer, messages.Rejected("")))

    # --- who coordinates

    def seen(self, view: View) -> None:
        """Takes a later view, which may name another coordinator."""
        mine = self._coordinator
        if mine is None:
            return
        is_another = view.coordinator != self._node.me and view.number > mine.view.number
        if is_another or self._node.has_ended:
            self._stop()

    def look(self) -> None:
        """Begins to coordinate if it is this server's turn."""
        view = self._node.view
        if view is None or self._coordinator is not None or view.broken or self._closed:
            return
        if self._node.has_ended:
            return
        living = self._living(view)
        starts = view.coordinator == self._node.me
        if starts or views.is_next_coordinator(view, self._node.me, living):
            here = [t.number for t in view.trainers if self._lives(t.client)]
            named = views.servers_of(view)
            over = [each for each in named if self._node.peers.lives.is_proven_over(each)]
            self._coordinator = Coordinator(self._node.me, view, living, over, here)
            self._do(self._coordinator.start())
            if view.publisher is not None and not self._lives(view.publisher.client):
                client = view.publisher.client
                self._do(self._coordinator.publisher_lost(client.name, client.incarnation))
            for server in sorted(self._role_members(view) - set(view.servers)):
                self._arrived(server)

    def _living(self, view: View) -> set[Server]:
        known = views.servers_of(view)
        names = {each.name for each in known} | set(view.settings.get("servers", ()))
        for name in names:
            latest = latest_life(self._node.host.worker, name)
            if latest is not None:
                known.add(Server(name, latest.incarnation))
        return {each for each in known if self._lives(each)}

    def _role_members(self, view: View) -> set[Server]:
        """The workers of the cluster's role that are there; none if its servers have names."""
        role = str(view.settings.get("role", ""))
        members = set()
        for info in self._node.host.worker.members() if role else ():
            latest = latest_life(self._node.host.worker, info.name)
            if latest is not None and Server(info.name, 0).is_of(role):
                members.add(Server(info.name, latest.incarnation))
        return members

    def _arrived(self, server: Server) -> None:
        """Takes one more worker of the cluster's role, which may not know of the cluster."""
        if self._coordinator is not None:
            self._do(self._coordinator.asked(next(self._numbers), orders.Arrive(server)))

    def _lives(self, who: views.Client | Server) -> bool:
        """False if that life is over; one of which nothing was heard is trusted for a while."""
        server = Server(who.name, who.incarnation)
        self._node.peers.trust(server)
        return self._node.peers.lives.verdict(server) is not Verdict.OVER

    # --- events

    def heard_lost(self, server: Server) -> None:
        """Takes note that a worker is gone."""
        if self._coordinator is not None:
            is_proven = self._node.peers.lives.is_proven_over(server)
            self._do(self._coordinator.server_lost(server, is_proven))
        if self._coordinator is not None:
            self._do(self._coordinator.worker_lost(server.name, server.incarnation))
        self.look()

    def heard_came(self, server: Server) -> None:
        """Takes note that a worker is there."""
        if self._coordinator is not None:
            self._do(self._coordinator.server_came(server))
        view = self._node.view
        if view is not None and server.is_of(str(view.settings.get("role", ""))):
            self._arrived(server)

    def asked(self, call: Call, what: orders.Request) -> None:
        """Takes a request."""
        self.look()
        if self._coordinator is None or self._is_undecided:
            call.answer(messages.Rejected(""))
            return
        number = next(self._numbers)
        if isinstance(what, orders.TakeSnapshot):
            begun = self._drafts.begin(number, call, what, self._coordinator.view)
            if isinstance(begun, Refused):
                call.answer(messages.Rejected(begun.reason))
            elif isinstance(begun, Snapshot):
                call.answer(messages.Granted(begun))
            if not isinstance(begun, orders.TakeSnapshot):
                return
            what = begun
        if isinstance(what, orders.Resize):
            for server in what.servers:
                if self._lives(server):
                    self._do(self._coordinator.server_came(server))
        self._requests[number] = call
        self._do(self._coordinator.asked(number, what))

    def _answered(self, ask: int, answer: object, by: Server | None = None) -> None:
        if answer is LOST or isinstance(answer, NotHead):
            return  # it will be told to another, or this coordinator is out of date
        if self._coordinator is not None:
            self._do(self._coordinator.answered(ask, answer, by))

    # --- what is to be done

    def _do(self, effects: list[tasks.Effect]) -> None:
        for effect in effects:
            if isinstance(effect, tasks.Tell):
                self._tell(effect)
            elif isinstance(effect, tasks.Ask):
                self._ask(effect)
            elif isinstance(effect, tasks.Undecided):
                self._wait_for_majority(effect.silent)
            elif isinstance(effect, tasks.Store):
                self._store(effect)
            elif isinstance(effect, tasks.Publish):
                self._publish(effect.view)
            elif isinstance(effect, tasks.Reply):
                self._settle(effect.request, messages.Granted(effect.result))
            elif isinstance(effect, tasks.Fail):
                self._settle(effect.request, messages.Rejected(effect.reason))
            elif isinstance(effect, tasks.Conclude):
                self._conclude(effect)
            elif isinstance(effect, tasks.Examine):
                self._examine(effect)
            elif isinstance(effect, tasks.Alarm):
                self._node.later(lambda: self._node.host.after(tasks.PATIENCE, self._ring))
            else:
                self._resign()

    def _tell(self, effect: tasks.Tell) -> None:
        assert self._coordinator is not None
        view = self._coordinator.view
        command = messages.Command(view.encode(), view.term, effect.shard, effect.order)
        coordinator = self._coordinator

        def answered(answer: object) -> None:
            if self._coordinator is coordinator:
                self._answered(effect.ask, answer, effect.to)

        self._node.peers.call(effect.to, command, answered)

    def _ask(self, effect: tasks.Ask) -> None:
        coordinator = self._coordinator
        assert coordinator is not None

        def answered(answer: object) -> None:
            if self._coordinator is coordinator:
                vote = None if answer is LOST else answer is True
                self._do(coordinator.answered(effect.ask, vote))

        def trainer_answered(answer: object) -> None:
            with self._node.acting():
                if answer is False and self._coordinator is coordinator:
                    again = partial(self._node.host.after, _SECONDS_BETWEEN_POLLS, ask_trainer)
                    self._node.later(again)
                else:
                    answered(answer)

        def ask_trainer() -> None:
            self._node.peers.caller.ask_trainer(effect.to, effect.suspects, trainer_answered)

        if effect.is_trainer:
            self._node.later(ask_trainer)
        else:
            poll = messages.Poll(effect.view.encode(), effect.suspects)
            self._node.peers.call(effect.to, poll, answered)

    def _wait_for_majority(self, silent: tuple[Server, ...]) -> None:
        self._is_undecided = True
        self._reject_all()
        names = ", ".join(map(str, silent))
        _logger.warning(
            "cluster %r: server %s cannot tell if it or %s is cut off, as too few servers vote; "
            "nothing is given up until one of them votes, has certainly ended, or comes back",
            self._node.cluster, self._node.me, names,
        )  # fmt: skip

    def _reject_all(self) -> None:
        """Rejects all requests; whoever made them asks again, for as long as it has patience."""
        for number in list(self._requests):
            self._settle(number, messages.Rejected(""))

    def _store(self, effect: tasks.Store) -> None:
        coordinator = self._coordinator
        assert coordinator is not None
        self._is_undecided = False

        def put() -> None:
            try:
                stored = self._meeting.replace(self._node.cluster, effect.expected, effect.view)
            except rpc.RpcError as error:
                _logger.error("the group's store is gone; the cluster stays as it is: %s", error)
                return
            with self._node.acting():
                if self._coordinator is coordinator:
                    self._do(coordinator.stored(stored, stored == effect.view))
                self._node.see(stored)

        self._node.later(put)

    def _publish(self, view: View) -> None:
        node = self._node
        text = view.encode()
        for server in view.servers:
            if server != node.me:
                node.peers.call(server, messages.See(text), lambda _: None)
        names = {trainer.client.name for trainer in view.trainers}
        node.later(lambda: self._post(names, text))

    def _post(self, names: set[str], text: str) -> None:
        channel = messages.CHANNEL + self._node.cluster
        for name in names:
            with contextlib.suppress(rpc.RpcError):
                self._node.host.worker.post(name, channel, text.encode())

    def _settle(self, request: int, answer: object) -> None:
        calls = self._drafts.end(request, isinstance(answer, messages.Granted))
        if request in self._requests:
            calls.append(self._requests.pop(request))
        for call in calls:
            self._node.later(partial(call.answer, answer))

    def _resign(self) -> None:
        self._stop()
        self._node.later(lambda: self._node.host.after(_SECONDS_BETWEEN_LOOKS, self._look_again))

    def _look_again(self) -> None:
        node = self._node
        try:
            view = self._meeting.view(node.cluster)
        except rpc.RpcError as error:
            if not node.has_ended:
                _logger.error("cluster %r: the view cannot be read: %s", node.cluster, error)
                node.host.after(_SECONDS_AFTER_AN_ERROR, self._look_again)
            return
        if view is not None:
            with node.acting():
                node.see(view)

    def _ring(self) -> None:
        with self._node.acting():
            if self._coordinator is not None:
                self._do(self._coordinator.rang())

    # --- snapshots

    def _conclude(self, effect: tasks.Conclude) -> None:
        view = self._node.view
        assert view is not None
        self._aside(effect.ask, lambda: self._drafts.commit(effect, view))

    def _examine(self, effect: tasks.Examine) -> None:
        self._aside(effect.ask, lambda: examine(effect.snapshots))

    def _aside(self, ask: int, work: Callable[[], object]) -> None:
        """Does what takes long on a thread of its own, and gives the coordinator the answer."""
        coordinator = self._coordinator

        def done() -> None:
            answer = work()
            with self._node.acting():
                if self._coordinator is coordinator:
                    self._answered(ask, answer)

        self._node.later(lambda: self._node.host.start(done))
