"""Runs the tasks of a coordinator: what is done one step after the other, as generators.

Each ``yield`` of a task says what it waits for: an edit of the view, answers of shards, servers
that come. Owns the edits, of which one at a time is on its way to the store, and the orders that
are not answered yet, which are given again to a shard's new head. Sans-IO, as its callers are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from tensorwire.parameter_server.decisions import orders, views
from tensorwire.parameter_server.decisions.quorum import Electorate
from tensorwire.parameter_server.decisions.views import Server, Snapshot, View
from tensorwire.parameter_server.opaque import Carried, Resumed

PATIENCE: Final = 10.0
"""Seconds that a cluster without state waits for its servers to come back."""

WENT_BACK: Final = "the cluster went back to its last snapshot"
"""The reason for which whoever waits for a change is turned away after a roll-back."""
_NO_SHARD: Final = -1

# --- what is to be done


@dataclass(frozen=True, slots=True)
class Store:
    """Replace the view in the store if it still is ``expected``; then call ``stored``."""

    expected: View
    view: View


@dataclass(frozen=True, slots=True)
class Tell:
    """Give a shard an order; then call ``answered`` with its number."""

    ask: int
    to: Server
    shard: int
    order: orders.Order


@dataclass(frozen=True, slots=True)
class Ask:
    """Ask somebody for the vote that these lives are over; then call ``answered``.

    Args:
        ask: numbers it.
        to: the server, or trainer.
        is_trainer: it is one.
        view: the view of which they are taken out.
        suspects: servers or trainers; it votes once it has heard of the end of each, too.
    """

    ask: int
    to: Server
    is_trainer: bool
    view: View
    suspects: frozenset[Server]


@dataclass(frozen=True, slots=True)
class Undecided:
    """Too few servers vote to tell who is lost; nothing is decided until that changes."""

    silent: tuple[Server, ...]


@dataclass(frozen=True, slots=True)
class Publish:
    """Let everybody know the view."""

    view: View


@dataclass(frozen=True, slots=True)
class Reply:
    """A request is done."""

    request: int
    result: object


@dataclass(frozen=True, slots=True)
class Fail:
    """A request cannot be done; without a reason, whoever wants it asks again."""

    request: int
    reason: str


@dataclass(frozen=True, slots=True)
class Conclude:
    """Write the manifest that makes a snapshot whole; then call ``answered``."""

    ask: int
    snapshot: Snapshot
    extra: object
    parts: tuple[Carried, ...]


@dataclass(frozen=True, slots=True)
class Examine:
    """Read these snapshots until one is whole; then call ``answered`` with an ``Examined``."""

    ask: int
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class Examined:
    """The answer to that.

    Args:
        whole: the first snapshot that is whole; None if none is.
        reason: what is wrong with those before it.
    """

    whole: Snapshot | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Call ``rang`` after so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Resign:
    """Another server coordinates."""


Effect = (
    Store | Tell | Ask | Undecided | Publish | Reply | Fail | Conclude | Examine | Alarm | Resign
)

# --- what a task waits for


@dataclass(frozen=True, slots=True)
class Edit:
    """The view to be replaced by what this makes of it; resumed with the new one."""

    change: Callable[[View], View]


@dataclass(frozen=True, slots=True)
class AskAll:
    """All answers to these orders, by shard."""

    orders: Mapping[int, orders.Order]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The manifest to be written; resumed with True or False."""

    snapshot: Snapshot
    extra: object
    parts: tuple[Carried, ...]


@dataclass(frozen=True, slots=True)
class Examination:
    """The first of these snapshots that is whole; resumed with an ``Examined``."""

    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True, slots=True)
class Others:
    """Waits for nothing, but others may change the cluster meanwhile."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Servers of these names, or an alarm; resumed with True if it rang."""

    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Majority:
    """Enough votes of servers that these lives are over; no others can then decide otherwise.

    The votes are asked for when this is waited for: earlier ones may have come before this
    server slept. The voters are the servers of the view that an ``Edit`` behind this changes. No
    votes are needed if that view names none of these lives, and this server coordinates.
    """

    suspects: frozenset[Server]


Wait = Edit | AskAll | Manifest | Examination | Others | Servers | Majority
Steps = Generator[Wait, Resumed, None]


class _Task:
    """Something that is being done, for whom, and what it waits for."""

    def __init__(self, steps: Steps, request: int | None = None) -> None:
        self.steps = steps
        self.request = request
        self.answers: dict[int, object] = {}
        self.missing: set[int] = set()
        self.names: frozenset[str] | None = None


@dataclass(slots=True, eq=False)
class _Poll:
    """The servers that were asked for their votes, for a task."""

    task: _Task
    suspects: frozenset[Server]
    asked: dict[int, tuple[Server, int]] = field(default_factory=dict)
    answered: set[Server] = field(default_factory=set)
    failed: set[Server] = field(default_factory=set)
    ahead: set[Server] = field(default_factory=set)
    """Those that have read the next view in the store before this server heard that it is there."""
    told: frozenset[Server] = frozenset()


@dataclass(slots=True)
class _Ask:
    """An order that is not answered yet; ``to`` whom it was given last."""

    task: _Task
    shard: int
    order: orders.Order
    to: Server | None = None


class Tasks:
    """The tasks of one coordinator.

    Args:
        me: this server.
        view: the view in which it begins.
        living: the servers that are there.
        over: those that certainly are not.
    """

    def __init__(
        self, me: Server, view: View, living: Iterable[Server], over: Iterable[Server]
    ) -> None:
        self.view = view
        self._me = me
        self._living = set(living)
        self._over = set(over)
        self._polls: list[_Poll] = []
        self._effects: list[Effect] = []
        self._edits: deque[tuple[Callable[[View], View], _Task]] = deque()
        self._storing: View | None = None
        self._asks: dict[int, _Ask] = {}
        self._numbers = 0
        self._tasks: list[_Task] = []
        self._change: _Task | None = None
        self._queue: deque[tuple[Callable[[], Steps], int | None]] = deque()
        self._repeatable: set[int] = set()
        """Requests that may be made again if they are given up, with the same result."""
        self._resigned = False

    # --- events

    def stored(self, view: View, accepted: bool) -> list[Effect]:
        """Takes the view that the store has now; ``accepted`` if it took ours."""
        if self._resigned or self._storing is None:
            return []
        if not accepted:
            return self._resign()
        self.view, self._storing = view, None
        _, task = self._edits.popleft()
        self._effects.append(Publish(view))
        self._retell()
        for poll in self._polls:
            poll.ahead.clear()
        self._resume(task, view)
        self._store_next()
        self._count_votes()
        return self._flush()

    def answered(self, ask: int, answer: object, by: Server | None = None) -> list[Effect]:
        """Takes an answer: of a shard to an order, of a server's vote, or of a written manifest.

        Args:
            ask: the number of what was asked.
            answer: what was answered; None by one that is lost.
            by: the server that carried out an order; it does not count if another was told since.
        """
        order = self._asks.get(ask)
        if by is not None and order is not None and order.to != by:
            return []
        for poll in self._polls:
            if ask in poll.asked:
                self._take_vote(poll, ask, answer)
                return self._flush()
        self._take_answer(ask, answer)
        return self._flush()

    def rang(self) -> list[Effect]:
        """Takes note that the time of an alarm is over."""
        for task in list(self._tasks):
            if task.names is not None:
                self._resume(task, True)
        return self._flush()

    # --- running

    def _flush(self) -> list[Effect]:
        self._count_votes()  # edits that they waited for may have had nothing to change
        self._next_change()
        effects, self._effects = self._effects, []
        return effects

    def _begin(self, steps: Steps, change: bool = False, request: int | None = None) -> None:
        task = _Task(steps, request)
        self._tasks.append(task)
        if change:
            self._change = task
        self._resume(task, None)

    def _to_all(self, order: orders.Order) -> AskAll:
        return AskAll({shard.number: order for shard in self.view.shards})

    def _line_up(self, make: Callable[[], Steps], request: int | None = None) -> None:
        """Puts a change in line: one is made after the other."""
        self._queue.append((make, request))

    def _next_change(self) -> None:
        """Begins what is next in line, if nothing else is under way."""
        raise NotImplementedError

    def _resume(self, task: _Task, value: object) -> None:
        if task not in self._tasks:
            return
        task.names = None
        try:
            wait = task.steps.send(value)
        except StopIteration:
            self._end(task)
            return
        if task in self._tasks:  # it may have cancelled itself with all others
            self._wait(task, wait)

    def _end(self, task: _Task) -> None:
        if task in self._tasks:
            self._tasks.remove(task)
        if self._change is task:
            self._change = None
        if task.request is not None:
            self._repeatable.discard(task.request)

    def _wait(self, task: _Task, wait: Wait) -> None:
        if isinstance(wait, Edit):
            self._edits.append((wait.change, task))
            self._store_next()
        elif isinstance(wait, AskAll):
            self._ask_all(task, wait.orders)
        elif isinstance(wait, Majority):
            self._polls.append(_Poll(task, wait.suspects))
            self._count_votes()
        elif isinstance(wait, Manifest):
            task.answers = {}
            ask = self._new_ask(task, _NO_SHARD, orders.Query())
            self._effects.append(Conclude(ask, wait.snapshot, wait.extra, wait.parts))
        elif isinstance(wait, Examination):
            task.answers = {}
            ask = self._new_ask(task, _NO_SHARD, orders.Query())
            self._effects.append(Examine(ask, wait.snapshots))
        elif isinstance(wait, Servers):
            if wait.names <= self._names_living():
                self._resume(task, False)
            else:
                task.names = wait.names
                self._effects.append(Alarm(PATIENCE))
        else:
            if self._change is task:
                self._change = None
            self._resume(task, None)

    def _store_next(self) -> None:
        """Makes the next edit, of what the one before it left."""
        while self._edits and self._storing is None:
            change, task = self._edits[0]
            new = change(self.view)
            if new is self.view:  # there is nothing to change
                self._edits.popleft()
                self._resume(task, new)
            else:
                self._storing = new
                self._effects.append(Store(self.view, new))

    def _ask_all(self, task: _Task, wanted: Mapping[int, orders.Order]) -> None:
        task.answers = {}
        asks = [self._new_ask(task, shard, order) for shard, order in wanted.items()]
        for ask in asks:
            self._tell(ask)
        if not asks:
            self._resume(task, {})

    def _new_ask(self, task: _Task, shard: int, order: orders.Order) -> int:
        self._numbers += 1
        self._asks[self._numbers] = _Ask(task, shard, order)
        task.missing.add(self._numbers)
        return self._numbers

    def _tell(self, number: int) -> None:
        """Gives an order to whom it is for by the view, if it was not given to it already."""
        ask = self._asks[number]
        shard = self.view.shard(ask.shard)
        if shard is not None and shard.chain:
            to = shard.chain[-1] if isinstance(ask.order, orders.Copy) else shard.head
            if to != ask.to:
                ask.to = to
                self._effects.append(Tell(number, to, ask.shard, ask.order))

    def _retell(self) -> None:
        """Sends the orders of lost servers to those in their place, after a change of the view."""
        for number, ask in list(self._asks.items()):
            if ask.shard == _NO_SHARD:
                continue
            heir_lost = isinstance(ask.order, orders.Copy) and ask.order.to not in self._living
            if heir_lost or self.view.shard(ask.shard) is None:
                self._take_answer(number, None)
            elif number in self._asks:
                self._tell(number)

    def _take_answer(self, number: int, answer: object) -> None:
        ask = self._asks.pop(number, None)
        if ask is None:
            return
        ask.task.answers[ask.shard] = answer
        ask.task.missing.discard(number)
        if not ask.task.missing:
            self._resume(ask.task, ask.task.answers)

    # --- votes

    def _widen_polls(self, lost: frozenset[Server]) -> None:
        """Asks once more for all votes, as others are lost, too; of the lost for none."""
        for poll in self._polls:
            if not lost <= poll.suspects:
                poll.suspects |= lost
                poll.asked, poll.answered, poll.failed, poll.ahead = {}, set(), set(), set()
        self._count_votes()

    def _take_vote(self, poll: _Poll, ask: int, answer: object) -> None:
        voter, number = poll.asked.pop(ask)
        if answer is True:
            poll.answered.add(voter)
        elif answer is None:
            poll.failed.add(voter)
        elif self.view.number == number:
            poll.ahead.add(voter)  # it is asked again once that view is here, too
        self._count_votes()

    def _count_votes(self) -> None:
        """Resumes who waits for a majority that is there.

        Not while a view is on its way to the store, or waits to be: it may name others, who have
        a vote, too.
        """
        for poll in list(self._polls):
            electorate = Electorate(self.view, self._over, poll.suspects)
            if poll not in self._polls:
                continue  # the task before it has ended all others
            if not (self._needs_no_votes(poll) or electorate.is_enough({*poll.answered, self._me})):
                self._ask_for_votes(poll, electorate)
            elif self._storing is None and not self._edits:
                self._polls.remove(poll)
                self._resume(poll.task, None)

    def _needs_no_votes(self, poll: _Poll) -> bool:
        """True if this server coordinates already, and the view names none of the suspects."""
        trainers = {Server(t.client.name, t.client.incarnation) for t in self.view.trainers}
        named = views.servers_of(self.view) | trainers
        return self.view.coordinator == self._me and poll.suspects.isdisjoint(named)

    def _ask_for_votes(self, poll: _Poll, electorate: Electorate) -> None:
        agreeing = {self._me, *poll.answered}
        ahead = poll.ahead & self._living
        known = agreeing.union(ahead, (voter for voter, _ in poll.asked.values()))
        trainers = set(electorate.trainers)
        for voter in electorate.to_ask(agreeing):
            if voter in self._living | trainers and voter not in known | poll.failed:
                self._numbers += 1
                poll.asked[self._numbers] = voter, self.view.number
                is_trainer = voter in trainers
                ask = Ask(self._numbers, voter, is_trainer, self.view, poll.suspects)
                self._effects.append(ask)
        silent = frozenset(electorate.servers) - known
        if silent and not (poll.asked or ahead) and silent != poll.told:
            poll.told = silent
            self._effects.append(Undecided(tuple(sorted(silent))))

    def _resign(self) -> list[Effect]:
        """Resigns, as another server coordinates: whoever asked for something must ask there."""
        self._resigned = True
        requests = [task.request for task in self._tasks if task.request is not None]
        requests += [request for _, request in self._queue if request is not None]
        self._tasks, self._asks, self._polls = [], {}, []
        self._queue.clear()
        effects: list[Effect] = [Fail(request, "") for request in requests]
        return [*effects, Resign()]

    def _cancel_all(self, reason: str) -> None:
        """Cancels all tasks, as the cluster goes back to where none of them was begun.

        Whoever asked for one hears the reason, unless it had better be asked for again.
        """
        for task in self._tasks:
            if task.request is not None:
                is_repeatable = task.request in self._repeatable
                self._effects.append(Fail(task.request, "" if is_repeatable else reason))
                self._repeatable.discard(task.request)
        self._tasks, self._asks, self._polls, self._change = [], {}, [], None
        self._edits = deque(list(self._edits)[:1]) if self._storing else deque()

    def _names_living(self) -> frozenset[str]:
        return frozenset(server.name for server in self._living)
