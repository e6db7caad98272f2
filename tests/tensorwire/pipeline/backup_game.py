"""A game of stages, backups, spares and a driver, in which workers die, freeze and are cut off.

The driver's decisions and the workers' shelves are the real ones; messages come in any order.
Stages are numbers: a step mixes the states of all stages into each stage's gradient, so that a
step of stages of different versions, a lost step or one taken twice shows in the end.

A worker that froze or was cut off goes on later, or at once, as a *zombie*: it answers and sends
as if nothing had been, while others have its stages, and a driver does so likewise.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any

from tensorwire.pipeline.backups.coordinator import (
    AwaitWorkers,
    Coordinator,
    Course,
    Effect,
    Execute,
    Form,
    Gather,
    Kind,
    Lost,
    Operation,
    Settle,
)
from tensorwire.pipeline.backups.places import (
    Found,
    NoCopyError,
    NoPlaceError,
    Owners,
    Seat,
    owner_in,
    seats_of,
)
from tensorwire.pipeline.backups.shelf import Epoch, Shelf
from tests.seeded_games import breaks, simplest
from tests.tensorwire.pipeline.backup_game_states import State, change, program, reference

Task = Generator[Any, Any, Any]


class Fenced(Exception):
    """A worker obeys a later driver."""


class _Answer:
    """Answers that are no values."""

    LOST = "lost"
    FENCED = "fenced"
    ABORTED = "aborted"


def _at_once() -> bool:
    return True


@dataclass
class Call:
    """A message and its answer."""

    source: Node
    target: Node | None
    what: tuple[Any, ...]
    done: bool = False
    answer: Any = None
    one_way: bool = False


@dataclass
class Part:
    """A worker's part of a formation."""

    epoch: Epoch
    form: Form
    lives: dict[str, Node]
    states: dict[Seat, State] = field(default_factory=dict)
    letters: dict[tuple[int, Seat], State] = field(default_factory=dict)
    is_closed: bool = False
    is_ready: bool = False


class Node:
    """A process in one life: a worker, or a driver."""

    def __init__(self, name: str, host: str) -> None:
        self.name, self.host = name, host
        self.is_dead = self.is_asleep = self.is_zombie = False
        self.shelf: Shelf[tuple[State, Any]] = Shelf()
        self.part: Part | None = None
        self.heard: list[Epoch] = []


class Game:
    """One game.

    Args:
        seed: of everything.
        most_faults: no more happens to anybody.
    """

    def __init__(self, seed: int, most_faults: int = 5) -> None:
        self.seed = seed
        self.dice = dice = random.Random(seed)
        workers = [f"w{n}" for n in range(dice.randint(2, 4))]
        spares = [f"s{n}" for n in range(dice.choice([0, 0, 1, 2]))]
        hosts = dice.randint(1, 3)
        self.hosts = {name: f"h{dice.randrange(hosts)}" for name in (*workers, *spares)}
        homes = [(dice.choice(workers),) for _ in range(dice.randint(1, 4))]
        if dice.random() < 0.2:
            homes[0] = tuple(dice.sample(workers, 2))
        self.homes: Owners = tuple(homes)
        self.workers, self.spares = workers, spares
        self.seats = seats_of(self.homes)
        self.batches = dice.randint(2, 6)
        self.losses, self.final = reference(seed, self.seats, self.batches)
        self.nodes: list[Node] = []
        self.calls: list[Call] = []
        self.members = {name: self._join(name) for name in (*workers, *spares)}
        self.tasks: list[tuple[Node, Task, list[Call] | Callable[[], bool]]] = []
        self.events: list[tuple[str, Any]] = []
        self.faults = min(most_faults, dice.choice([0, 1, 1, 1, 2, 3, 5]))
        self.reign = 0
        self.over = ""
        self.gone_since_settled: set[int] = set()
        self.has_settled = False
        self.log: list[str] = []
        self._start_driver()

    def play(self) -> str:
        """Plays to the end, which is returned: "finished" or "lost".

        Raises:
            AssertionError: a rule was broken.
        """
        for _ in range(20_000):
            if self.over:
                return self.over
            if self.faults and self.dice.random() < 0.01:
                self.faults -= 1
                self._fault()
            ready = [n for n, task in enumerate(self.tasks) if self._is_ready(task)]
            if ready and (not self.events or self.dice.random() < 0.6):
                self._run(self.tasks.pop(self.dice.choice(ready)))
            elif self.events:
                self._happen(*self.events.pop(self.dice.randrange(len(self.events))))
            else:
                raise AssertionError(f"{self.seed}: everybody waits for ever")
        raise AssertionError(f"{self.seed}: no end")

    # --- processes and messages

    def _join(self, name: str) -> Node:
        node = Node(name, self.hosts[name])
        self.nodes.append(node)
        return node

    def _is_ready(self, task: tuple[Node, Task, Any]) -> bool:
        node, _, wait = task
        if node.is_dead or node.is_asleep:
            return False
        return all(each.done for each in wait) if isinstance(wait, list) else wait()

    def _run(self, task: tuple[Node, Task, Any]) -> None:
        node, course, wait = task
        sent = [each.answer for each in wait] if isinstance(wait, list) else None
        try:
            wait = course.send(sent)
        except StopIteration:
            return
        self.tasks.append((node, course, wait))

    def _call(self, source: Node, target: Node | None, *what: Any, one_way: bool = False) -> Call:
        call = Call(source, target, what, one_way=one_way)
        self.calls.append(call)
        self.events.append(("deliver", call))
        return call

    def _happen(self, event: str, what: Any) -> None:
        match event:
            case "deliver":
                self._deliver(what)
            case "answer":
                call, answer = what
                if not call.done and not (call.source.is_zombie and self._is_dropped()):
                    call.done, call.answer = True, answer
            case "notice":
                self._notice(what)
            case "wake":
                what.is_asleep = False
            case "return":
                if what not in self.members:
                    self.members[what] = self._join(what)
            case "driver":
                self._start_driver()

    def _is_dropped(self) -> bool:
        return self.dice.random() < 0.3

    def _deliver(self, call: Call) -> None:
        target = call.target
        if target is None or self.members.get(target.name) is not target:
            if not call.one_way:  # a zombie may get it all the same
                call.done, call.answer = True, _Answer.LOST
            if target is None or target.is_dead or self._is_dropped():
                return
        if target.is_asleep and self.dice.random() < 0.9:
            self.events.append(("deliver", call))
        elif not target.is_dead:
            self.tasks.append((target, self._serve(target, call), _at_once))

    def _serve(self, node: Node, call: Call) -> Task:
        """Handles one message on a worker."""
        handler = getattr(self, f"_on_{call.what[0]}")
        answer = yield from handler(node, *call.what[1:])
        self.events.append(("answer", (call, answer)))

    # --- faults

    def _fault(self) -> None:
        living = list(self.members.values()) or [self.driver]
        kind = self.dice.choice(["kill", "kill", "freeze", "cut", "driver"])
        node = self.driver if kind == "driver" else self.dice.choice(living)
        if node.is_dead or node.is_zombie:
            return
        if kind == "kill" or (kind == "driver" and self.dice.random() < 0.5):
            node.is_dead = True
        elif kind != "cut":
            node.is_asleep = True
        node.is_zombie = True
        if node is not self.driver:
            self.gone_since_settled.add(id(node))
        self.log.append(f"{kind} {node.name}")
        if node is self.driver:
            self.events.append(("driver", None))
            if not node.is_dead:
                self.events.append(("wake", node))
        else:
            self.events.append(("notice", node))

    def _notice(self, node: Node) -> None:
        """The group takes a worker for lost: calls to it fail, and it may come back."""
        if self.members.get(node.name) is node:
            del self.members[node.name]
        self.calls = [each for each in self.calls if not each.done]
        for call in self.calls:
            if call.target is node and not call.done:
                call.done, call.answer = True, _Answer.LOST
        if not node.is_dead:
            self.events.append(("wake", node))
        if self.dice.random() < 0.7:
            self.events.append(("return", node.name))

    # --- a worker

    def _enter(self, node: Node, epoch: Epoch) -> bool:
        """Obeys an epoch, unless the node has heard of a later one."""
        obeys = node.shelf.enter(epoch)
        for known in node.heard:
            assert not obeys or epoch.may_follow(known), f"{self.seed}: obeyed an earlier epoch"
        if obeys:
            node.heard.append(epoch)
            if node.part is not None and node.part.epoch != epoch:
                node.part.is_closed, node.part = True, None
        return obeys

    def _on_gather(self, node: Node, epoch: Epoch, begins: bool) -> Task:
        yield []
        if not self._enter(node, epoch):
            return _Answer.FENCED
        if begins:
            node.shelf.clear(epoch)
        return Found(node.host, node.shelf.copies())

    def _on_fetch(self, node: Node, seat: Seat, version: int) -> Task:
        yield []
        return node.shelf.get(seat, version) or _Answer.ABORTED

    def _on_settle(self, node: Node, epoch: Epoch, version: int) -> Task:
        yield []
        node.shelf.settle(epoch, version)

    def _on_put(self, node: Node, epoch: Epoch, seat: Seat, version: int, copy: Any) -> Task:
        yield []
        if not self._enter(node, epoch):
            return _Answer.FENCED
        assert node.shelf.put(epoch, seat, version, copy)
        return "kept"

    def _on_form(self, node: Node, form: Form, lives: dict[str, Node]) -> Task:
        if not self._enter(node, form.epoch):
            return _Answer.FENCED
        part = node.part = Part(form.epoch, form, lives)
        if form.version is not None:
            node.shelf.go_back(form.epoch, form.version)
        for seat in (s for s in self.seats if owner_in(form.owners, s) == node.name):
            if form.version is None:
                part.states[seat] = State(0, seat.stage)
                continue
            found = node.shelf.get(seat, form.version)
            if found is None:
                fetch = self._call(node, lives.get(form.sources[seat]), "fetch", seat, form.version)
                (found,) = yield [fetch]
            if not isinstance(found, tuple):
                return _Answer.ABORTED
            if not node.shelf.put(form.epoch, seat, form.version, found):
                return _Answer.FENCED
            part.states[seat] = found[0]
        part.is_ready = True
        return "formed"

    def _on_letter(self, node: Node, epoch: Epoch, number: int, seat: Seat, state: State) -> Task:
        yield (
            lambda: (
                node.part is None
                or not epoch.may_follow(node.part.epoch)
                or (node.part.epoch == epoch)
            )
        )
        if node.part is not None and node.part.epoch == epoch:
            node.part.letters[number, seat] = state

    def _on_execute(self, node: Node, epoch: Epoch, number: int, operation: Operation) -> Task:
        yield []
        part = node.part
        if part is None or part.epoch != epoch or not part.is_ready:
            return _Answer.ABORTED
        waiting = []
        if operation.cut is not None:
            waiting = self._cut(node, part, operation)
        loss = None
        if operation.work == "position":
            return next((k for s, (_, k) in self._own(node, operation.drawn) if not s.stage), None)
        if operation.kind is Kind.TRAIN and operation.work is not None:
            for seat, state in part.states.items():
                for target in sorted({owner_in(part.form.owners, s) for s in self.seats}):
                    letter = ("letter", epoch, number, seat, state)
                    self._call(node, part.lives[target], *letter, one_way=True)
            wanted = [(number, seat) for seat in self.seats]
            yield lambda: part.is_closed or all(each in part.letters for each in wanted)
            if part.is_closed:
                return _Answer.ABORTED
            states = [part.letters[each] for each in wanted]
            assert len({s.steps for s in states}) == 1, f"{self.seed}: a mixed step"
            weights = tuple(s.weights for s in states)
            part.states = {
                s: state.trained(s, operation.work, weights) for s, state in part.states.items()
            }
            loss = hash((operation.work, weights))
        elif operation.work is not None:
            part.states = {s: change(operation.work, x) for s, x in part.states.items()}
        answers = yield waiting
        if any(each != "kept" for each in answers):
            return _Answer.ABORTED
        return "done" if operation.kind is not Kind.TRAIN else ("done", loss)

    def _cut(self, node: Node, part: Part, operation: Operation) -> list[Call]:
        calls = []
        for seat, state in part.states.items():
            copy = (state, operation.kept)
            put = (part.epoch, seat, operation.cut, copy)
            if not node.shelf.put(*put):
                continue
            if backup := part.form.backups.get(seat):
                calls.append(self._call(node, part.lives.get(backup), "put", *put))
        return calls

    def _own(self, node: Node, version: int) -> list[tuple[Seat, tuple[State, Any]]]:
        assert node.part is not None
        found = [(seat, node.shelf.get(seat, version)) for seat in node.part.states]
        return [(seat, copy) for seat, copy in found if copy is not None]

    # --- the driver

    def _start_driver(self) -> None:
        self.reign += 1
        self.driver = Node(f"driver{self.reign}", "h0")
        self.nodes.append(self.driver)
        epoch = Epoch(self.reign, self.driver.name, 0)
        coordinator = Coordinator(self.homes, self.spares, epoch)
        self.tasks.append((self.driver, self._drive(self.driver, coordinator), _at_once))

    def _drive(self, node: Node, coordinator: Coordinator) -> Task:
        yield []
        carrier = _Carrier(self, node, coordinator)
        try:
            start = yield from self._begin(carrier, coordinator)
            numbers = [len([w for b in range(n) for w in program(self.seed, b) if w == "train"])
                       for n in range(self.batches)]  # fmt: skip
            for batch in range(start, self.batches):
                if self.dice.random() < 0.15:
                    yield from carrier.out(self._move(coordinator, batch))
                number = numbers[batch]
                for work in program(self.seed, batch):
                    kind = {"train": Kind.TRAIN, "step": Kind.STEP}.get(str(work), Kind.CHANGE)
                    what = batch if work == "train" else work
                    done = yield from carrier.out(
                        coordinator.perform(Operation(kind, what, kept=batch))
                    )
                    if work == "train":
                        assert done == self.losses[number], f"{self.seed}: a wrong loss"
                        number += 1
            if node is self.driver and not node.is_zombie:
                self._end(carrier)
        except Fenced:
            assert node is not self.driver, f"{self.seed}: the latest driver is not obeyed"
        except NoCopyError as error:
            self._lose(node, error)

    def _begin(self, carrier: _Carrier, coordinator: Coordinator) -> Task:
        """Forms the pipeline; returns the batch with which to begin."""
        if self.has_settled:
            version = yield from carrier.out(coordinator.resume())
            ask = Operation(Kind.ASK, "position", drawn=version)
            return (yield from carrier.out(coordinator.perform(ask)))
        while True:
            try:
                yield from carrier.out(coordinator.open())
                yield from carrier.out(coordinator.back_up(0))
            except (Lost, NoCopyError, NoPlaceError):
                self.events.extend(("return", w) for stage in self.homes for w in stage)
                yield lambda: all(w in self.members for stage in self.homes for w in stage)
                continue
            return 0

    def _lose(self, node: Node, error: NoCopyError) -> None:
        """A driver found a stage without a copy, which takes two losses."""
        if node is self.driver:
            assert len(self.gone_since_settled) > 1, f"{self.seed}: {error}, but {self.log}"
            self.over = "lost"

    def _move(self, coordinator: Coordinator, batch: int) -> Course:
        owners = [
            tuple(self.dice.sample(sorted(self.members), len(stage)))
            if len(self.members) >= len(stage) else stage for stage in coordinator.owners
        ]  # fmt: skip
        yield from coordinator.move(tuple(owners), kept=batch)

    def _end(self, carrier: _Carrier) -> None:
        for seat, state in self.final.items():
            owner = carrier.lives[owner_in(carrier.form.owners, seat)]
            if owner.part is not None and owner.part.epoch == carrier.form.epoch:
                assert owner.part.states[seat] == state, f"{self.seed}: {seat} is wrong"
        self.over = "finished"


class _Carrier:
    """Carries a coordinator's effects out in the game."""

    def __init__(self, game: Game, node: Node, coordinator: Coordinator) -> None:
        self.game, self.node, self.coordinator = game, node, coordinator
        self.lives: dict[str, Node] = {}
        self.form = Form(coordinator.epoch, coordinator.homes, {})
        self.found = self._executed = 0
        self.version: int | None = None

    def out(self, course: Course) -> Task:
        """Carries all effects of a course out; returns what it returns."""
        try:
            effect = next(course)
            while True:
                try:
                    result = yield from self._carry_out(effect)
                except Lost:
                    effect = course.throw(Lost())
                else:
                    effect = course.send(result)
        except StopIteration as end:
            return end.value

    def _carry_out(self, effect: Effect) -> Task:
        match effect:
            case Gather():
                return (yield from self._gather(effect))
            case Form():
                return (yield from self._form(effect))
            case Execute():
                return (yield from self._execute(effect))
            case Settle():
                self._settle(effect)
            case AwaitWorkers():
                for name in sorted(effect.names):
                    self.game.events.append(("return", name))
                yield lambda: any(name in self.game.members for name in effect.names)

    def _gather(self, effect: Gather) -> Task:
        if effect.begins:
            self.game.has_settled = False
        members = self.game.members
        names = [name for name in effect.names or sorted(members) if name in members]
        what = "gather", effect.epoch, effect.begins
        answers = yield [self.game._call(self.node, members[name], *what) for name in names]
        if _Answer.FENCED in answers:
            raise Fenced
        found = {n: a for n, a in zip(names, answers, strict=True) if isinstance(a, Found)}
        self.found = len(found.keys() & set(self.coordinator.known()))
        return found

    def _form(self, effect: Form) -> Task:
        assert self.found < 2 or len(effect.backups) == len(self.game.seats), (
            f"{self.game.seed}: a seat without a backup, though there are {self.found} workers"
        )
        for seat, backup in effect.backups.items():
            assert backup != owner_in(effect.owners, seat), f"{self.game.seed}: backs itself up"
        self.version = effect.version
        self.form, self.lives = effect, dict(self.game.members)
        owners = dict.fromkeys(w for stage in effect.owners for w in stage)
        for stage in effect.owners:
            assert len(set(stage)) == len(stage), f"{self.game.seed}: a worker with two replicas"
        yield from self._all([*owners], "form", effect, self.lives)

    def _execute(self, effect: Execute) -> Task:
        if effect.operation.cut is not None:
            self.version = effect.operation.cut
        if effect.operation.kind is Kind.STEP:
            self._require_copies()
        owners = dict.fromkeys(w for stage in self.form.owners for w in stage)
        self._executed += 1
        answers = yield from self._all(
            [*owners], "execute", effect.epoch, self._executed, effect.operation
        )
        if effect.operation.work == "position":
            return next(each for each in answers if each is not None)
        done = [each[1] for each in answers if isinstance(each, tuple)]
        return done[0] if done else None

    def _require_copies(self) -> None:
        """No stage makes step s + 1 before every backup has version s."""
        version = self.version
        for seat in self.form.backups:
            assert version is not None
            holders = [n for n in self.game.nodes if n.shelf.get(seat, version) is not None]
            assert len(holders) > 1, f"{self.game.seed}: {seat} steps without a backup of {version}"

    def _settle(self, effect: Settle) -> None:
        game = self.game
        if self.node is not game.driver:
            return
        game.has_settled = True
        used = {w for stage in self.form.owners for w in stage} | set(self.form.backups.values())
        in_use = [self.lives[name] for name in sorted(used) if name in self.lives]
        game.gone_since_settled = {id(node) for node in in_use if node.is_zombie}
        if len(self.form.backups) < len(game.seats):
            game.gone_since_settled |= {-1, -2}  # nobody was left to back up
        for node in self.lives.values():
            game._call(self.node, node, "settle", effect.epoch, effect.version, one_way=True)

    def _all(self, names: list[str], *what: Any) -> Task:
        calls = [self.game._call(self.node, self.lives.get(n), *what) for n in names]
        bad = (_Answer.LOST, _Answer.ABORTED, _Answer.FENCED)
        yield lambda: all(c.done for c in calls) or any(c.done and c.answer in bad for c in calls)
        answers = [each.answer for each in calls if each.done]
        if _Answer.FENCED in answers:
            raise Fenced
        if any(each in (_Answer.LOST, _Answer.ABORTED) for each in answers):
            raise Lost
        return answers


def check_game(seed: int) -> str:
    """Plays the game of a seed; returns its end.

    Raises:
        AssertionError: a rule was broken.
    """
    return Game(seed).play()


def shorten_game(seed: int) -> str:
    """The fewest faults that break the game of a seed."""
    faults = simplest(
        5, lambda n: range(n), lambda n: breaks(lambda most: Game(seed, most).play(), n)
    )
    return f"so does Game({seed}, most_faults={faults}).play()"
