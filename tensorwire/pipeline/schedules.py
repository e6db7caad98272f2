"""The known schedules, as functions from the size of a pipeline to a table of actions.

Every function takes the numbers of stages, workers and micro-batches and returns a
:class:`~tensorwire.pipeline.actions.Table`. Which stages a worker has follows from the
schedule: with ``w`` workers, worker ``i`` has the stages ``i``, ``i + w``, ``i + 2w``, … except
in ZBV, where the stages go down the workers and up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from tensorwire.pipeline.actions import Action, Kind, Table
from tensorwire.pipeline.errors import ScheduleError

F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT  # noqa: E741  # as in tables


class Schedule(Protocol):
    """Makes the table for a number of stages, workers and micro-batches."""

    def __call__(self, stages: int, workers: int, microbatches: int) -> Table:
        """Returns the table.

        Raises:
            ScheduleError: the schedule does not work with these numbers.
        """


def forward_only(stages: int, workers: int, microbatches: int) -> Table:
    """Forward passes alone, as evaluation needs them: all of a stage, then its next stage."""
    _require(stages, workers, microbatches)
    return Table.of(
        _all(range(worker, stages, workers), F, range(microbatches)) for worker in range(workers)
    )


def gpipe(stages: int, workers: int, microbatches: int) -> Table:
    """All forward passes, then all backward passes.

    Holds the activations of all micro-batches at once.
    """
    _require(stages, workers, microbatches)
    rows = []
    for worker in range(workers):
        local = range(worker, stages, workers)
        forward = _all(local, F, range(microbatches))
        rows.append([*forward, *_all(reversed(local), B, range(microbatches))])
    return Table.of(rows)


def looped_bfs(stages: int, workers: int, microbatches: int) -> Table:
    """Breadth first: as GPipe with several stages per worker, backward in reverse order."""
    _require(stages, workers, microbatches)
    rows = []
    for worker in range(workers):
        forward = list(_all(range(worker, stages, workers), F, range(microbatches)))
        rows.append([*forward, *(_at(action, B) for action in reversed(forward))])
    return Table.of(rows)


def one_forward_one_backward(stages: int, workers: int, microbatches: int) -> Table:
    """1F1B: after a warm-up, each worker does one forward pass and one backward pass in turn.

    Stage ``i`` holds the activations of at most ``stages - i`` micro-batches.
    """
    _require(stages, workers, microbatches)
    if stages != workers:
        raise ScheduleError(
            f"1F1B has one stage per worker, but there are {stages} stages on {workers} workers; "
            "with several stages per worker, use 'interleaved'"
        )
    rows = []
    for stage in range(stages):
        forward = _all([stage], F, range(microbatches))
        backward = _all([stage], B, range(microbatches))
        rows.append(_alternate(forward, backward, min(stages - stage - 1, microbatches)))
    return Table.of(rows)


def interleaved(stages: int, workers: int, microbatches: int) -> Table:
    """Interleaved 1F1B: several stages per worker, which makes the bubble shorter.

    Micro-batches go in rounds of about one per worker through all stages of a worker.
    """
    size = _round_size(stages, workers, microbatches)
    rows = []
    for worker in range(workers):
        forward, backward = _rounds(worker, stages, workers, microbatches, size, B)
        ahead = (stages // workers - 1) * size + 2 * (workers - 1 - worker)
        rows.append(_alternate(iter(forward), iter(backward), min(ahead, len(forward))))
    return Table.of(rows)


def zb_h1(stages: int, workers: int, microbatches: int) -> Table:
    """ZB-H1: 1F1B, or its interleaved form, with the gradients of weights filling the bubble.

    With one stage per worker no stage holds more than ``stages`` micro-batches.
    """
    size = _round_size(stages, workers, microbatches)
    rows = []
    for worker in range(workers):
        forward, backward = _rounds(worker, stages, workers, microbatches, size, I)
        ahead = (stages // workers - 1) * size + (workers - 1 - worker)
        row = _alternate(iter(forward), iter(backward), min(ahead, len(forward)))
        rows.append(_with_weights(row, delay=worker))
    return Table.of(rows)


def zbv(stages: int, workers: int, microbatches: int) -> Table:
    """ZBV: two stages per worker, down the workers and up again, with next to no bubble.

    The bubble vanishes where a forward pass, the gradients of inputs and those of weights
    take equally long.
    """
    _require(stages, workers, microbatches)
    if stages != 2 * workers:
        raise ScheduleError(
            f"ZBV has two stages per worker, but there are {stages} stages on {workers} workers"
        )
    enough = max(microbatches, 2 * workers - 1)  # to fill the pipeline; what is too much goes
    return Table.of(
        [each for each in _zbv_row(worker, workers, enough) if each.microbatch < microbatches]
        for worker in range(workers)
    )


SCHEDULES: Final[dict[str, Schedule]] = {
    "forward": forward_only,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb-h1": zb_h1,
    "zbv": zbv,
}
"""The schedules by the names that ``Pipeline(schedule=…)`` knows."""


def _require(stages: int, workers: int, microbatches: int) -> None:
    if min(stages, workers, microbatches) < 1:
        raise ScheduleError(
            "a schedule needs at least one stage, worker and micro-batch, but got "
            f"{stages=}, {workers=}, {microbatches=}"
        )
    if stages % workers:
        raise ScheduleError(
            f"{stages} stages cannot be dealt out evenly to {workers} workers; "
            "give each worker as many, or write a table of your own"
        )


def _all(stages: Iterable[int], kind: Kind, each: range) -> Iterator[Action]:
    return (Action(stage, kind, microbatch) for stage in stages for microbatch in each)


def _at(action: Action, kind: Kind) -> Action:
    return Action(action.stage, kind, action.microbatch)


def _alternate(
    forward: Iterator[Action], backward: Iterator[Action], ahead: int
) -> Iterator[Action]:
    """``ahead`` forward passes, then one and one in turn, then what backward passes are left."""
    for _, action in zip(range(ahead), forward, strict=False):
        yield action
    for action in forward:
        yield action
        yield next(backward)
    yield from backward


def _round_size(stages: int, workers: int, microbatches: int) -> int:
    """The number of micro-batches that go through a worker's stages together."""
    _require(stages, workers, microbatches)
    rounds = max(1, microbatches // workers)
    if microbatches % rounds:
        raise ScheduleError(
            f"{microbatches} micro-batches cannot be dealt out evenly to {rounds} rounds of about "
            f"{workers}; {microbatches - microbatches % rounds} could"
        )
    return microbatches // rounds


def _rounds(
    worker: int, stages: int, workers: int, microbatches: int, size: int, backward: Kind
) -> tuple[list[Action], list[Action]]:
    """One worker's forward and backward passes, round after round through its stages."""
    local = range(worker, stages, workers)
    rounds = [range(start, start + size) for start in range(0, microbatches, size)]
    return (
        [action for each in rounds for action in _all(local, F, each)],
        [action for each in rounds for action in _all(reversed(local), backward, each)],
    )


def _with_weights(row: Iterator[Action], delay: int) -> Iterator[Action]:
    """Puts one weight pass after each input pass, the first ``delay`` of them at the end."""
    owed: list[Action] = []
    paid = 0
    for action in row:
        yield action
        if action.kind is I:
            owed.append(_at(action, W))
            if len(owed) > delay:
                yield owed[paid]
                paid += 1
    yield from owed[paid:]


class _Counter:
    """Numbers the micro-batches of one stage and kind."""

    def __init__(self, stage: int, kind: Kind) -> None:
        self.make: Callable[[int], Action] = partial(Action, stage, kind)
        self.count = 0

    def next(self) -> Action:
        self.count += 1
        return self.make(self.count - 1)


def _zbv_row(worker: int, workers: int, microbatches: int) -> Iterator[Action]:
    down, up = worker, 2 * workers - 1 - worker
    f0, i0, w0 = (_Counter(down, kind) for kind in (F, I, W))
    f1, i1, w1 = (_Counter(up, kind) for kind in (F, I, W))
    for _ in range(2 * (workers - worker) - 1):
        yield f0.next()
    for _ in range(worker):
        yield f1.next()
        yield f0.next()
    for _ in range(workers - worker):
        yield from (f1.next(), i1.next(), w1.next())
    while f1.count < f0.count or f0.count < microbatches:
        if f0.count < microbatches:
            yield f0.next()
        yield from (i0.next(), w0.next(), f1.next(), i1.next(), w1.next())
    for _ in range(worker):
        yield from (i0.next(), i1.next())
    for _ in range(workers - worker):
        yield from (i0.next(), w0.next())
    while w1.count < i1.count:
        yield w1.next()
    while w0.count < i0.count:
        yield w0.next()
