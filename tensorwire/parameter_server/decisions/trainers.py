"""Decides who joins as a trainer, who has finished, what counts of one that was lost. Sans-IO."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import replace
from functools import partial
from typing import Final

from tensorwire.parameter_server.decisions import orders, view_changes
from tensorwire.parameter_server.decisions.publishing import Publishing
from tensorwire.parameter_server.decisions.quorum import Electorate
from tensorwire.parameter_server.decisions.tasks import (
    WENT_BACK,
    Edit,
    Effect,
    Fail,
    Majority,
    Reply,
    Steps,
    Wait,
)
from tensorwire.parameter_server.decisions.views import Client, Left, Server, View
from tensorwire.parameter_server.opaque import Resumed

_HAS_LEFT: Final = "this trainer has left the cluster"


class Trainers(Publishing):
    """The part of a coordinator that lets trainers join and go.

    Args:
        me: this server.
        view: the view in which it begins.
        living: the servers that are there.
        over: those of the view whose end is certain.
        trainers: of the trainers of the view, those that are there, by number.
    """

    def __init__(
        self,
        me: Server,
        view: View,
        living: Iterable[Server],
        over: Iterable[Server],
        trainers: Iterable[int],
    ) -> None:
        super().__init__(me, view, living, over)
        here = set(trainers)
        self._arrivals: dict[Client, list[int]] = {}
        self._started: dict[Client, int] = {}
        self._gone = {t.client for t in view.trainers if t.number not in here}
        self._certainly_gone: set[Client] = set()

    def worker_lost(self, name: str, incarnation: int) -> list[Effect]:
        """Takes note that a worker is gone, which may have been a trainer, or about to be one."""
        for client in [*self._arrivals, *(trainer.client for trainer in self.view.trainers)]:
            if (client.name, client.incarnation) == (name, incarnation):
                self._gone.add(client)
                self._arrivals.pop(client, None)
                trainer = self.view.trainer(client)
                if trainer is not None:
                    self._dismiss_soon(trainer.number)
                    self._widen_polls(self._lost_trainers())
        return self.publisher_lost(name, incarnation)

    def _resign(self) -> list[Effect]:
        waiting = [Fail(each, "") for requests in self._arrivals.values() for each in requests]
        self._arrivals.clear()
        return [*waiting, *super()._resign()]

    def _ask_to_join(self, request: int, join: orders.Join) -> None:
        if join.client in self._gone:  # an echo of a request that was answered long ago
            self._effects.append(Fail(request, _HAS_LEFT))
            return
        known = self.view.trainer(join.client)
        self._arrivals.setdefault(join.client, []).append(request)
        self._started[join.client] = join.started
        if known is not None and self._change is None:
            self._answer_arrivals()

    def _may_join(self) -> bool:
        new = [who for who in self._arrivals if self.view.trainer(who) is None]
        if not new:
            self._answer_arrivals()
        return bool(new) and (self.view.joined > 0 or len(new) >= self._expected(new))

    def _expected(self, new: Iterable[Client]) -> int:
        """The number of trainers that wait for each other to begin.

        Where nobody said it, as many as the one of them that was started last knows to have been
        started. In a job of fixed size all know of all, so all begin with the same cut and get
        the same bits; where agents come and go, nobody need agree about a number that depends
        on when he was started, and who comes later joins as he does in a running cluster.
        """
        said = int(self.view.settings.get("trainers", 1))
        return said or max(self._started[who] for who in new)

    def _join(self) -> Steps:
        """Makes all who have asked trainers, at one cut."""
        before = self.view.joined
        yield Edit(self._with_arrivals)
        new = [trainer for trainer in self.view.trainers if trainer.number >= before]
        for trainer in new:
            if trainer.client in self._gone:  # while the view was stored
                self._dismiss_soon(trainer.number)
        yield from self._cut(joins=[trainer.number for trainer in new])
        self._answer_arrivals()

    def _with_arrivals(self, view: View) -> View:
        new = [who for who in self._arrivals if view.trainer(who) is None]
        return view_changes.with_trainers(view, new) if new else view

    def _answer_arrivals(self) -> None:
        for who, requests in list(self._arrivals.items()):
            trainer = self.view.trainer(who)
            if trainer is not None:
                del self._arrivals[who]
                self._effects += [Reply(request, trainer.number) for request in requests]

    def _leave(self, request: int, what: orders.Leave) -> Steps:
        """Lets go of a trainer that has finished, unless the cluster went back meanwhile."""
        before = self.view.trainers
        yield Edit(lambda view: _without_leaver(view, what))
        if what.generation != self.view.generation:
            self._effects.append(Fail(request, WENT_BACK))
            return
        left = {t.client for t in before if t.number == what.trainer}
        self._gone |= left
        self._certainly_gone |= left
        for client in left:
            for echo in self._arrivals.pop(client, ()):  # it would join, and leave, for ever
                self._effects.append(Fail(echo, _HAS_LEFT))
        yield from self._settle(what.trainer)
        self._effects.append(Reply(request, None))

    def _dismiss_soon(self, number: int) -> None:
        """Begins to dismiss a trainer that was lost.

        Under BSP no cut waits for it, as what one shard has applied all have; so this may wait for
        a move, which drops what was split by the old map. Otherwise a cut may wait for this.
        """
        if self.view.is_together:
            self._line_up(lambda: self._dismiss(number))
        else:
            self._begin(self._dismiss(number))

    def _lost_trainers(self) -> frozenset[Server]:
        """The lives of trainers that are lost and not dismissed, if trainers may have to decide.

        They have no vote. A dismissal may have to wait for a change that waits for a server that
        was lost, too, as on one machine: all three would wait for ever.
        """
        voters = Electorate(self.view, self._over, ()).servers
        if 2 * len({self._me, *self._living}.intersection(voters)) > len(voters):
            return frozenset()
        gone = self._gone - self._certainly_gone
        clients = (trainer.client for trainer in self.view.trainers)
        return frozenset(life_of(each) for each in clients if each in gone)

    def _dismiss(self, number: int) -> Steps:
        """Dismisses a trainer that was lost."""
        clients = [t.client for t in self.view.trainers if t.number == number]
        if not self._certainly_gone.issuperset(clients):
            yield Majority(frozenset(map(life_of, clients)) | self._lost_trainers())
        self._certainly_gone.update(clients)
        yield Edit(lambda view: _without_trainer(view, number))
        end = yield from self._settle(number)
        for client in clients:
            yield Edit(partial(view_changes.with_left, left=Left(number, client.name, None, end)))

    def _settle(self, number: int) -> Generator[Wait, Resumed, int]:
        """Counts the pushes of a trainer that all shards have, and returns how many these are."""
        haves = yield self._to_all(orders.Silence(number))
        end = keep = min((have for have in haves.values() if have is not None), default=0)
        if None in {haves.get(each, 0) for each in self.view.active}:
            # that shard was made without it, so nothing more of it is applied anywhere
            if self.view.is_together:
                keep = 0
            else:
                self._line_up(lambda: self._forget(number))
        yield self._to_all(orders.Settle(number, keep))
        return end

    def _forget(self, number: int) -> Steps:
        """Counts no push of a lost trainer that was split by the map of now."""
        yield self._to_all(orders.Settle(number, 0))

    def _without_gone(self, view: View) -> View:
        gone = self._numbers_gone(view)
        return view_changes.without_trainers(view, gone) if gone else view

    def _numbers_gone(self, view: View) -> list[int]:
        return [t.number for t in view.trainers if t.client in self._certainly_gone]


def life_of(client: Client) -> Server:
    """The life of a trainer's worker."""
    return Server(client.name, client.incarnation)


def _without_trainer(view: View, number: int) -> View:
    known = any(trainer.number == number for trainer in view.trainers)
    return view_changes.without_trainers(view, {number}) if known else view


def _without_leaver(view: View, what: orders.Leave) -> View:
    leaver = next((each for each in view.trainers if each.number == what.trainer), None)
    if leaver is None or what.generation != view.generation:
        return view
    left = Left(leaver.number, leaver.client.name, what.begin, what.end)
    trainers = tuple(each for each in view.trainers if each is not leaver)
    return replace(view_changes.with_left(view, left), trainers=trainers)
