"""Whole groups that shut down while they work, under a seeded scheduler.

Messages are delivered in any order while workers work, die, leave and join.
Nobody may close while a call is outstanding or a notice under way that no lost
worker caused, and everybody who lives must close in the end.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rpc.protocol.termination import (
    AnswerWhenQuiet,
    Effect,
    Enter,
    Phase,
    Tell,
    Termination,
    TerminationMessage,
)

Life = tuple[int, int]


@dataclass(eq=False)
class Work:
    """A request that is being handled: what it still does, and for whom."""

    causes: frozenset[Life]
    steps: int
    depth: int
    caller: Life | None = None
    number: int = 0
    waits_for: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Message:
    """Anything between two lives; ``kind`` is request, reply, notice or control."""

    kind: str
    source: Life
    to: Life
    causes: frozenset[Life] = frozenset()
    depth: int = 0
    number: int = 0
    control: TerminationMessage | None = None


class Worker:
    """A machine, and the work around it."""

    def __init__(self, life: Life, group: Iterable[Life]) -> None:
        self.life = life
        self.knows = {worker: (worker, incarnation) for worker, incarnation in group}
        self.machine = Termination(life[0], set(self.knows))
        self.gone = False
        self.finished = False
        self.begun = False
        self.probed = False
        self.outstanding: dict[int, tuple[Life, Work]] = {}
        self.serving: list[Work] = []
        self.activity = 0
        self.sent: Counter[int] = Counter()
        self.received: Counter[int] = Counter()

    def quiet(self) -> bool:
        return not self.outstanding and not self.serving


class Simulation:
    """Workers that work, die, leave and join while they shut down together."""

    MAX_STEPS = 20_000

    def __init__(self, seed: int, *, deaths: bool, joins: bool) -> None:
        self.random = random.Random(seed)
        lives = [(worker, 0) for worker in range(self.random.randint(1, 4))]
        self.workers = {life: Worker(life, lives) for life in lives}
        self.messages: list[Message] = []
        self.news: list[tuple[str, Life, Life]] = []  # lost or joined, who hears it, of whom
        self.numbers = itertools.count(1)
        self.calls_left = self.random.randint(0, 6)
        self.diligence = self.random.choice([0.05, 0.3, 1.0])
        self.patience = self.random.choice([0.0, 0.5, 1.0])
        self.deaths_left = self.random.randint(0, 2) if deaths else 0
        self.joins_left = self.random.randint(1, 2) if joins else 0
        self.decided: dict[Phase, frozenset[Life]] = {}

    def run(self) -> None:
        for _ in range(self.MAX_STEPS):
            choices = self.choices()
            if not choices:
                break
            act, *arguments = self.random.choice(choices)
            act(*arguments)
            for worker in self.alive():
                self.answer(worker)
        else:
            raise AssertionError("the group runs in circles")
        stuck = [worker.life for worker in self.alive()]
        assert not stuck, f"{stuck} wait for ever"

    def choices(self) -> list[tuple]:
        alive = self.alive()
        found: list[tuple] = [(self.deliver, m) for m in self.messages if self.deliverable(m)]
        found += [(self.hear, news) for news in self.news if self.audible(news)]
        found += [(self.leave, worker) for worker in alive if worker.finished]
        idle = [worker for worker in alive if not worker.begun]
        found += [(self.begin, worker) for worker in idle if self.random.random() < 0.3]
        if idle and self.calls_left:
            found.append((self.call, self.random.choice(idle)))
        if self.deaths_left and len(alive) > 1 and self.random.random() < 0.05:
            found.append((self.die, self.random.choice(alive)))
        if self.joins_left and self.random.random() < 0.05:
            found.append((self.join,))
        if not found or self.random.random() < self.diligence:
            found += [(self.work, worker, work) for worker in alive for work in worker.serving]
        return found or [(self.begin, worker) for worker in idle]

    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if not worker.gone]

    # What happens

    def begin(self, worker: Worker) -> None:
        worker.begun = True
        self.perform(worker, worker.machine.begin())

    def call(self, worker: Worker) -> None:
        self.calls_left -= 1
        work = Work(frozenset({worker.life}), 0, self.random.randint(0, 8))
        self.request(worker, work)

    def work(self, worker: Worker, work: Work) -> None:
        if work.steps:
            work.steps -= 1
            act = self.request if work.depth and self.random.random() < 0.7 else self.notify
            act(worker, work)
        elif not work.waits_for:
            worker.serving.remove(work)
            if worker.knows.get(work.caller[0]) == work.caller:
                self.send("reply", worker, work.caller, work.causes, number=work.number)
            worker.activity += 1

    def die(self, worker: Worker) -> None:
        self.deaths_left -= 1
        self.vanish(worker)

    def leave(self, worker: Worker) -> None:
        self.vanish(worker)

    def vanish(self, worker: Worker) -> None:
        worker.gone = True
        self.messages = [m for m in self.messages if m.to != worker.life]
        self.news = [news for news in self.news if news[1] != worker.life]
        for other in self.alive():
            self.news.append(("lost", other.life, worker.life))

    def join(self) -> None:
        self.joins_left -= 1
        group = [worker.life for worker in self.alive() if not worker.finished]
        dead = [life for life in self.workers if self.workers[life].gone]
        worker, incarnation = len({worker for worker, _ in self.workers}), 0
        if dead and self.random.random() < 0.5:
            worker, incarnation = max(life for life in self.workers if life[0] == dead[0][0])
            incarnation += 1
            if not self.workers[worker, incarnation - 1].gone:
                return
        life = (worker, incarnation)
        self.workers[life] = Worker(life, [*group, life])
        self.news += [("joined", other, life) for other in group]

    def deliverable(self, message: Message) -> bool:
        return ("joined", message.to, message.source) not in self.news

    def audible(self, news: tuple[str, Life, Life]) -> bool:
        """Who closes is lost after what it sent; a new life is heard of after the old one."""
        kind, listener, life = news
        if kind == "joined":
            return self.workers[listener].knows.get(life[0]) is None
        orderly = self.workers[life].finished
        return ("joined", listener, life) not in self.news and not (
            orderly and any((m.source, m.to) == (life, listener) for m in self.messages)
        )

    def hear(self, news: tuple[str, Life, Life]) -> None:
        self.news.remove(news)
        kind, listener, life = news
        worker = self.workers[listener]
        if kind == "joined":
            worker.knows[life[0]] = life
            self.perform(worker, worker.machine.joined(life[0]))
            return
        if worker.knows.pop(life[0], None) is None:
            return
        self.messages = [m for m in self.messages if (m.source, m.to) != (life, listener)]
        for number, (to, work) in [*worker.outstanding.items()]:
            if to == life:
                self.ended(worker, number, work)
        worker.sent.pop(life[0], None)
        worker.received.pop(life[0], None)
        self.perform(worker, worker.machine.lost(life[0]))

    def deliver(self, message: Message) -> None:
        self.messages.remove(message)
        worker = self.workers[message.to]
        if worker.knows.get(message.source[0]) != message.source:
            return
        if message.kind == "control":
            self.perform(worker, worker.machine.receive(message.source[0], message.control))
        elif message.kind == "request":
            steps = self.random.randint(1, 2)
            worker.serving.append(
                Work(message.causes, steps, message.depth, message.source, message.number)
            )
        elif message.kind == "reply":
            _, work = worker.outstanding[message.number]
            self.ended(worker, message.number, work)
        else:
            worker.received[message.source[0]] += 1
            if message.depth and self.random.random() < 0.5:
                self.notify(worker, Work(message.causes, 0, message.depth))

    def answer(self, worker: Worker) -> None:
        if worker.probed and worker.quiet():
            worker.probed = False
            effects = worker.machine.quiet(worker.activity, worker.sent, worker.received)
            self.perform(worker, effects)

    # What workers do

    def request(self, worker: Worker, work: Work) -> None:
        to = self.random.choice([*worker.knows.values()])
        number = next(self.numbers)
        worker.activity += 1
        worker.outstanding[number] = (to, work)
        if self.random.random() < self.patience:
            work.waits_for.add(number)
        self.send("request", worker, to, work.causes, max(0, work.depth - 1), number)

    def ended(self, worker: Worker, number: int, work: Work) -> None:
        del worker.outstanding[number]
        work.waits_for.discard(number)

    def notify(self, worker: Worker, work: Work) -> None:
        others = [life for life in worker.knows.values() if life != worker.life]
        if others:
            to = self.random.choice(others)
            worker.sent[to[0]] += 1
            self.send("notice", worker, to, work.causes, max(0, work.depth - 1))

    def send(
        self,
        kind: str,
        worker: Worker,
        to: Life,
        causes: frozenset[Life] = frozenset(),
        depth: int = 0,
        number: int = 0,
        control: TerminationMessage | None = None,
    ) -> None:
        if not self.workers[to].gone:
            causes = causes | {worker.life, to}
            self.messages.append(Message(kind, worker.life, to, causes, depth, number, control))

    def perform(self, worker: Worker, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Tell):
                to = worker.knows.get(effect.to)
                if to is not None:
                    self.send("control", worker, to, control=effect.message)
            elif isinstance(effect, AnswerWhenQuiet):
                worker.probed = True
            elif isinstance(effect, Enter):
                self.enter(worker, effect.phase)
            else:
                worker.finished = True
                self.check(self.decided[Phase.CLOSE], notices=True)

    def enter(self, worker: Worker, phase: Phase) -> None:
        group = self.decided.setdefault(phase, frozenset(worker.knows.values()))
        self.check(group, notices=phase is Phase.CLOSE)
        if phase is Phase.RELEASE:
            for _ in range(self.random.randint(0, 3)):
                self.notify(worker, Work(frozenset({worker.life}), 0, 2))

    def check(self, group: frozenset[Life], *, notices: bool) -> None:
        """Nothing may be left but what a worker caused that is not there any more."""
        living = {life for life in group if not self.workers[life].gone or self.left(life)}
        calls = [m for m in self.messages if m.kind in ("request", "reply")]
        left = [m for m in calls if m.causes <= living]
        left += [w for life in living for w in self.workers[life].serving if w.causes <= living]
        if notices:
            left += [m for m in self.messages if m.kind == "notice" and m.causes <= living]
        assert not left, f"{left} would be cut short"

    def left(self, life: Life) -> bool:
        return self.workers[life].finished


def simulate(seeds: range, *, deaths: bool = False, joins: bool = False) -> None:
    for seed in seeds:
        try:
            Simulation(seed, deaths=deaths, joins=joins).run()
        except BaseException:
            print(f"reproduce with Simulation({seed}, {deaths=}, {joins=}).run()")
            raise


def test_a_group_finishes_when_all_is_done_and_not_before():
    simulate(range(400))


def test_a_group_finishes_whoever_dies_whenever():
    simulate(range(500), deaths=True)


def test_a_group_finishes_whoever_joins_or_comes_back():
    simulate(range(300), joins=True)
    simulate(range(300), deaths=True, joins=True)
