"""Decides how a cluster changes: who joins, who was lost, where a cut lies, what moves where.

One server coordinates, the first living one of the view. What the cluster shall be stands in the
view, which it replaces by compare-and-set; then it makes the shards follow, by orders. An order
goes to a shard, and is given again to its new head when the old one is lost; every order may be
carried out twice. If the coordinator is lost, the next one asks the shards where they are,
finishes the cut that some shard was told, or gives it up if none was, and carries on from there.

Events go in by methods, each of which returns what is to be done (``tasks`` says what).
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

from tensorwire.parameter_server.decisions import beginnings, orders, view_changes, views
from tensorwire.parameter_server.decisions.lives import is_before
from tensorwire.parameter_server.decisions.publishing import why_not_written
from tensorwire.parameter_server.decisions.pushes import Reached, Status
from tensorwire.parameter_server.decisions.tasks import (
    WENT_BACK,
    AskAll,
    Edit,
    Effect,
    Examination,
    Fail,
    Majority,
    Manifest,
    Others,
    Reply,
    Servers,
    Steps,
    Wait,
)
from tensorwire.parameter_server.decisions.trainers import Trainers, life_of
from tensorwire.parameter_server.decisions.views import KEPT, Server, Snapshot, View
from tensorwire.parameter_server.opaque import Resumed

_CHANGES_PER_TERM: Final = 1 << 20


class Coordinator(Trainers):
    """The work of one server while it coordinates.

    Args:
        me: this server.
        view: the view in which it begins; of its own making or another's.
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
        super().__init__(me, view, living, over, trainers)
        self._changes = 0
        self._copying = False
        self._failed_copy: tuple[int, tuple[int, Server]] | None = None
        self._counted: set[str] = set()

    # --- events

    def start(self) -> list[Effect]:
        """Begins to coordinate."""
        self._begin(self._take_over(), change=True)
        return self._flush()

    def server_lost(self, server: Server, is_proven: bool = False) -> list[Effect]:
        """Takes note that a server is gone.

        Args:
            server: which.
            is_proven: its end is certain.
        """
        self._lose(server, is_proven)
        self._count_votes()
        return self._flush()

    def _lose(self, server: Server, is_proven: bool) -> None:
        if is_proven:
            self._over.add(server)
        if server in self._living:
            self._living.discard(server)
            self._widen_polls(self._lost_trainers())
            if self.view.coordinator == self._me:  # else once it has taken over
                self._begin(self._drop_server(server))

    def server_came(self, server: Server) -> list[Effect]:
        """Takes note that a server is there."""
        self._note_living(server)
        for task in list(self._tasks):
            if task.names is not None and task.names <= self._names_living():
                self._resume(task, False)
        return self._flush()

    def _note_living(self, server: Server) -> None:
        """Notes a server's life; its former ones are over, even if nobody heard of their ends."""
        self._living.add(server)
        known = views.servers_of(self.view) | self._living
        for former in sorted(each for each in known if is_before(each, server)):
            self._lose(former, is_proven=True)
        self._count_votes()

    def asked(self, request: int, what: orders.Request) -> list[Effect]:
        """Takes a request."""
        if self._resigned:
            return [Fail(request, "")]
        if self.view.broken:
            return [Fail(request, self.view.broken)]
        if isinstance(what, orders.Announce | orders.CountSamples):
            self._repeatable.add(request)
        if isinstance(what, orders.Join):
            self._ask_to_join(request, what)
        elif isinstance(what, orders.Leave):
            self._begin(self._leave(request, what), request=request)
        elif isinstance(what, orders.Announce):
            self._line_up(lambda: self._declare(request, what), request)
        elif isinstance(what, orders.Arrive):
            self._note_living(what.server)
            self._begin(self._add_server(request, what.server), request=request)
        elif isinstance(what, orders.TakeSnapshot):
            self._line_up(lambda: self._take_snapshot(request, what), request)
        elif isinstance(what, orders.TakeVersion):
            self._line_up(lambda: self._take_version(request, what), request)
        elif isinstance(what, orders.Commit):
            self._begin(self._publish(request, what), request=request)
        elif isinstance(what, orders.EndPublishing):
            self._line_up(lambda: self._stop_publishing(request, what), request)
        elif isinstance(what, orders.CountSamples):
            self._line_up(lambda: self._count_samples(request, what), request)
        else:
            self._line_up(lambda: self._resize(request, what), request)
        return self._flush()

    def _next_change(self) -> None:
        while self._change is None and not self._resigned and not self.view.broken:
            if self._queue:
                make, request = self._queue.popleft()
                self._begin(make(), change=True, request=request)
            elif self._may_join():
                self._begin(self._join(), change=True)
            else:
                self._restore_backups()
                return

    def _give_up_all(self) -> None:
        self._cancel_all(WENT_BACK)
        self._copying = False

    def _new_change(self) -> int:
        self._changes += 1
        return self.view.term * _CHANGES_PER_TERM + self._changes

    # --- taking over

    def _take_over(self) -> Steps:
        me = self._me
        lost = views.servers_of(self.view) - self._living
        gone = self._gone - self._certainly_gone
        if self.view.coordinator != me or lost or gone:
            yield Majority(frozenset(lost.union(map(life_of, gone))))
        self._certainly_gone |= gone
        yield Edit(lambda view: view_changes.taken_over(view, me, lost, self._numbers_gone(view)))
        self._drop_lost()
        if _lost_shards(self.view):
            self._begin_again()
            return
        statuses = yield from self._finish_cut()
        for name, text in self.view.declared.items():
            yield self._to_all(orders.Declare(name, text))
        known = {trainer for status in statuses.values() for trainer in status.counts}
        expected = {trainer.number for trainer in self.view.trainers}
        for number in sorted(known - expected):
            self._dismiss_soon(number)
        yield from self._conform(statuses, sorted(expected - known))

    def _finish_cut(self) -> Generator[Wait, Resumed, dict[int, Status]]:
        """Finishes a cut: one that some shard was told is told to all, any other is given up."""
        answers = yield self._to_all(orders.Query())
        statuses: dict[int, Status] = {s: each for s, each in answers.items() if each is not None}
        cuts = [each.cut for each in statuses.values() if each.cut is not None]
        latest = max(cuts, key=lambda cut: cut.change, default=None)
        going: dict[int, orders.Order] = {}
        releases: dict[int, orders.Order] = {}
        for shard, status in statuses.items():
            ahead = status.cut is not None and not status.reached
            if latest is not None and (ahead or status.holding == latest.change):
                going[shard] = orders.Go(latest)
            elif status.holding is not None:
                releases[shard] = orders.Release(status.holding)
        yield AskAll(going)
        yield AskAll(releases)
        answers = yield self._to_all(orders.Query())
        return {shard: each for shard, each in answers.items() if each is not None}

    def _conform(self, statuses: Mapping[int, Status], missing: list[int]) -> Steps:
        """Goes on with what the last coordinator had written into the view, but not carried out."""
        behind = [each for each in statuses.values() if each.epoch < self.view.epoch]
        unprimed = [s.number for s in self.view.shards if s.number not in statuses]
        if behind:
            yield from self._move()
        elif unprimed:
            yield AskAll({shard: beginnings.beginning(self.view) for shard in unprimed})
        if missing:
            yield from self._cut(joins=missing)
        yield from self._trim()

    # --- cuts

    def _cut(
        self, joins: Collection[int] = (), action: object = None, samplers: tuple[str, ...] = ()
    ) -> Generator[Wait, Resumed, Reached]:
        """Brings all shards to one cut, within their epoch."""
        change = self._new_change()
        statuses = yield AskAll({shard: orders.Hold(change) for shard in self.view.active})
        cut = beginnings.meeting(self.view, change, statuses.values(), joins)
        cut = replace(cut, action=action, samplers=samplers)
        answers = yield AskAll({shard: orders.Go(cut) for shard in statuses})
        return Reached(cut, next((each for each in answers.values() if each is not None), {}))

    def _move(self) -> Steps:
        """Brings the shards to the map of the view, at a cut."""
        change, epoch = self._new_change(), self.view.epoch
        answers = yield self._to_all(orders.Query())
        old = [s for s, each in answers.items() if each is not None and each.epoch < epoch]
        statuses = yield AskAll({shard: orders.Hold(change) for shard in old})
        awaited = {shard: frozenset(old) - {shard} for shard in self.view.active}
        cut = beginnings.meeting(self.view, change, statuses.values(), ())
        cut = replace(cut, epoch=epoch, awaited=awaited, action=orders.Move(self.view.slots))
        yield AskAll(beginnings.primes(self.view, cut, old))
        yield AskAll({shard: orders.Go(cut) for shard in old})

    # --- declarations

    def _declare(self, request: int, what: orders.Announce) -> Steps:
        """Enters a declaration; the first to declare a name says what it is.

        Not while rows move: a shard that hears of it before it moves would expect parameters from
        one that hears of it afterwards.
        """
        yield Edit(lambda view: _with_declared(view, what))
        yield self._to_all(orders.Declare(what.name, self.view.declared[what.name]))
        self._effects.append(Reply(request, self.view.declared[what.name]))

    def _count_samples(self, request: int, what: orders.CountSamples) -> Steps:
        """Enters a sampler as the first to name it describes it; counts its samples from a cut."""
        yield Edit(lambda view: view_changes.with_sampler(view, what.name, what.text))
        if what.name not in self._counted:
            yield from self._cut(samplers=(what.name,))
            self._counted.add(what.name)
        self._effects.append(Reply(request, self.view.samplers[what.name]))

    # --- servers

    def _drop_server(self, server: Server) -> Steps:
        yield Majority(frozenset([server]) | self._lost_trainers())
        yield Edit(lambda view: _without_server(view, server))
        if _lost_shards(self.view):
            self._begin_again()

    def _drop_lost(self) -> None:
        """Drops the servers of the view that were lost, but for those that are being voted on."""
        suspects = {each for poll in self._polls for each in poll.suspects}
        for server in sorted(views.servers_of(self.view) - self._living - suspects):
            self._begin(self._drop_server(server))

    def _add_server(self, request: int, server: Server) -> Steps:
        yield Edit(
            lambda view: view if server in view.servers else view_changes.with_server(view, server)
        )
        self._effects.append(Reply(request, None))
        if self.view.settings.get("grows"):
            self._line_up(self._grow)

    def _grow(self) -> Steps:
        """Gives each server of the cluster's role that is there its share."""
        role = str(self.view.settings["role"])
        mine = [each for each in self.view.servers if each in self._living and each.is_of(role)]
        if {shard.head for shard in self.view.shards if shard.chain} != set(mine):
            yield from self._spread(tuple(sorted(mine, key=Server.number_in_role)))

    def _restore_backups(self) -> None:
        """Has a shard with too few backups copied, one at a time."""
        if not self._copying and self._wanting() is not None:
            self._copying = True
            self._begin(self._back_up())

    def _wanting(self) -> tuple[int, Server] | None:
        """A shard that lacks a backup, and who could be it; not what failed in this very view."""
        wanting = views.wanting(self.view, self._living)
        return None if (self.view.number, wanting) == self._failed_copy else wanting

    def _back_up(self) -> Steps:
        while (wanting := self._wanting()) is not None:
            number, server = wanting
            answers = yield AskAll({number: orders.Copy(server)})
            if answers.get(number) and server in self._living:
                yield Edit(partial(_backed_up, number=number, server=server))
            else:
                self._failed_copy = (self.view.number, wanting)
        self._copying = False

    def _resize(self, request: int, what: orders.Resize) -> Steps:
        gone = [each.name for each in what.servers if each not in self._living]
        if gone:
            self._effects.append(Fail(request, f"servers {', '.join(gone)} are not there"))
            return
        self._living.update(what.servers)
        yield from self._spread(what.servers)
        self._effects.append(Reply(request, None))

    def _spread(self, servers: tuple[Server, ...]) -> Steps:
        yield Edit(lambda view: view_changes.resized(view, servers))
        yield from self._move()
        yield from self._trim()

    def _trim(self) -> Steps:
        """Lets go of shards that are empty, once what they had has arrived."""
        if all(shard.number in self.view.active for shard in self.view.shards):
            return
        yield AskAll({shard: orders.Open() for shard in self.view.active})
        yield Edit(view_changes.trimmed)

    # --- snapshots

    def _take_snapshot(self, request: int, what: orders.TakeSnapshot) -> Steps:
        generation = self.view.generation
        before = frozenset(each.number for each in self.view.left)
        reached = yield from self._cut(action=orders.Freeze())
        cut = reached.cut
        shards = [shard.number for shard in self.view.shards]
        yield Others()
        parts = yield AskAll({s: orders.Write(cut.change, what.draft) for s in shards})
        lost = [shard for shard in shards if parts.get(shard) is None]
        if any(self.view.shard(shard) is None for shard in lost):
            self._effects.append(Fail(request, ""))  # it went with a resize before it had written
            return
        missing = [why_not_written(s, parts.get(s)) for s in shards]
        if any(missing) or generation != self.view.generation:
            self._effects.append(Fail(request, "; ".join(filter(None, missing)) or WENT_BACK))
            return
        snapshot = Snapshot(what.folder, cut.vector, cut.time, reached.accounts)
        written = yield Manifest(snapshot, what.extra, tuple(parts[s] for s in shards))
        failed = [each for each in written.values() if each is not True]
        if failed:
            reason = f"the manifest in {what.folder} was not written: {failed[0]}"
            self._effects.append(Fail(request, reason))
            return
        yield Edit(lambda view: view_changes.saved(view, snapshot, before))
        self._effects.append(Reply(request, snapshot))

    # --- going back

    def _begin_again(self) -> None:
        """Begins anew as state is lost: from the last snapshot, or empty as before."""
        self._give_up_all()
        self._begin(self._roll_back(), change=True)

    def _roll_back(self) -> Steps:
        whole, why = None, "there is no snapshot to go back to"
        is_empty = not (self.view.joined or self.view.snapshots)
        if self.view.snapshots:
            (answer,) = (yield Examination(self.view.snapshots)).values()
            whole, why = answer.whole, f"no snapshot is whole: {answer.reason}"
        if whole is None and not is_empty:
            lost = ", ".join(str(each) for each in _lost_shards(self.view))
            reason = f"all servers of shard {lost} were lost, and {why}"
            yield Edit(lambda view: replace(view, number=view.number + 1, broken=reason))
            return
        if whole is not None and whole != self.view.snapshot:
            yield Edit(lambda view: view_changes.going_back(view, whole))
        wanted = [str(name) for name in self.view.settings.get("servers", ())]
        yield Servers(frozenset(wanted))
        yield Edit(self._without_gone)
        yield Edit(lambda view: view_changes.rolled_back(view, self._survivors(wanted)))
        yield self._to_all(beginnings.beginning(self.view))
        self._drop_lost()
        for trainer in self.view.trainers:
            if trainer.client in self._gone:
                self._dismiss_soon(trainer.number)

    def _survivors(self, wanted: list[str]) -> list[Server]:
        """The servers to begin again with, in the order in which the user named them."""
        living = {server.name: server for server in sorted(self._living)}
        named = [living[name] for name in wanted if name in living]
        return named or [self._me]


def _lost_shards(view: View) -> list[int]:
    return [shard.number for shard in view.shards if not shard.chain]


def _without_server(view: View, server: Server) -> View:
    return view_changes.without(view, {server}) if server in views.servers_of(view) else view


def _backed_up(view: View, number: int, server: Server) -> View:
    shard = view.shard(number)
    usable = shard is not None and server not in shard.chain and server in view.servers
    return view_changes.backed_up(view, number, server) if usable else view


def _with_declared(view: View, what: orders.Announce) -> View:
    if not view.declared.get(what.name, KEPT).startswith(KEPT):
        return view
    declared = {**view.declared, what.name: what.text}
    return replace(view, number=view.number + 1, declared=declared)
