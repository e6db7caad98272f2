"""Starts steps at all workers of a pipeline, waits for them, and ends those that fail.

The first worker that fails ends the step: it is called off everywhere, and the error says
which stage failed, on which worker, at which micro-batch. Where a worker died, that follows
from what of its work had arrived at the others.
"""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import rpc
from tensorwire.pipeline import sessions
from tensorwire.pipeline.actions import Action, Kind
from tensorwire.pipeline.errors import StageFailedError, StepAbortedError
from tensorwire.pipeline.letters import STEP, Address, Content
from tensorwire.pipeline.microbatches import Given
from tensorwire.pipeline.placement import owner_of
from tensorwire.pipeline.plan import Plan, Progress, StepOrder, StepReport
from tensorwire.pipeline.worker import Outbox

_SECONDS_TO_ABORT: Final = 10.0


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has begun.

    Args:
        order: what was ordered.
        rows: the actions of each worker.
        replies: of each worker, to come.
    """

    order: StepOrder
    rows: Mapping[str, tuple[Action, ...]]
    replies: Mapping[str, rpc.Future[StepReport | None]]


class Steps:
    """Runs the steps of one pipeline.

    Args:
        plan: of the pipeline.
        outbox: brings letters to its workers.
    """

    def __init__(self, plan: Plan, outbox: Outbox) -> None:
        self._plan = plan
        self._outbox = outbox

    def begin(
        self, order: StepOrder, rows: Mapping[str, tuple[Action, ...]], given: Sequence[Given]
    ) -> Step:
        """Starts a step and sends out its micro-batches; does not wait for anything."""
        replies = {
            worker: rpc.rpc_async(worker, sessions.run, (self._plan.session, order), timeout=0)
            for worker in rows
        }
        step = Step(order, rows, replies)
        try:
            self._send(order, given)
        except rpc.WorkerLostError as error:
            raise self._failure(step, error.name, error) from error
        except BaseException:
            self.abort([step], "the driver could not send its micro-batches")
            raise
        return step

    def finish(self, step: Step, later: Iterable[Step] = ()) -> dict[str, StepReport]:
        """Waits until a step is over everywhere.

        Args:
            step: the one.
            later: others that have begun, which end with it if it fails.

        Raises:
            StageFailedError: a stage raised an error, or a worker was lost.
        """
        done: queue.SimpleQueue[str] = queue.SimpleQueue()
        for worker, reply in step.replies.items():
            reply.add_done_callback(lambda _, worker=worker: done.put(worker))
        reports: dict[str, StepReport] = {}
        try:
            while len(reports) < len(step.replies):
                worker = done.get()
                try:
                    reports[worker] = _report(step, worker)
                except Exception as error:
                    raise self._failure(step, worker, error, later) from error
        except StageFailedError:
            raise
        except BaseException:  # such as KeyboardInterrupt
            self.abort([step, *later], "the driver gave it up")
            raise
        if step.order.rows.trains and self._outbox.name not in reports:
            self._outbox.count_step()
        return reports

    def _send(self, order: StepOrder, given: Sequence[Given]) -> None:
        wiring = self._plan.wiring
        last = wiring.stages - 1
        for microbatch, each in enumerate(given):
            for stage in range(wiring.stages):
                if names := wiring.keywords(stage):
                    values = {name: _argument(name, each) for name in names}
                    self._post(order, Content.ACTIVATION, stage, microbatch, values)
            if order.rows.trains:
                self._post(order, Content.TARGET, last, microbatch, each.target)

    def _post(
        self, order: StepOrder, content: Content, stage: int, microbatch: int, value: Any
    ) -> None:
        worker = owner_of(self._plan.owners, stage, microbatch)
        self._outbox.deliver(worker, Address(order.step, content, STEP, stage, microbatch), value)

    def _failure(
        self, step: Step, worker: str, error: BaseException, later: Iterable[Step] = ()
    ) -> StageFailedError:
        """Calls a step off; returns the error that tells why."""
        lost = _lost_worker(worker, error)
        progress = self.abort([step, *later], f"{lost or worker}: {error}")
        if lost is None:
            reached = progress.get(worker)
            at = reached.failed if reached else None
        else:
            worker = lost
            at = self._next_of(worker, step.rows[worker], progress.values())
        stage = at.stage if at else min(self._stages_of(worker), default=-1)
        return StageFailedError(stage, worker, at.microbatch if at else -1, _reason(error))

    def abort(self, steps: Sequence[Step], reason: str) -> dict[str, Progress]:
        """Calls steps off at all workers that can be reached; returns how far these got."""
        number = max(step.order.step for step in steps)
        progress: dict[str, Progress] = {}
        calls = {}
        for worker in steps[0].rows:
            arguments = (self._plan.session, steps[0].order.step, number, reason)
            calls[worker] = rpc.rpc_async(
                worker, sessions.abort, arguments, timeout=_SECONDS_TO_ABORT
            )
        for worker, call in calls.items():
            try:
                reached = call.wait()
            except Exception:  # it is lost as well: nothing of it is left to call off
                continue
            if reached is not None:
                progress[worker] = reached
        return progress

    def _next_of(
        self, worker: str, row: Sequence[Action], others: Iterable[Progress]
    ) -> Action | None:
        """The first action of a lost worker that nobody got anything of."""
        arrived = {
            (each.content, each.source, each.target, each.microbatch)
            for other in others
            for each in other.arrived
        }
        sent = [n for n, action in enumerate(row) if not arrived.isdisjoint(self._sent_by(action))]
        after = sent[-1] + 1 if sent else 0
        return row[after] if after < len(row) else None

    def _sent_by(self, action: Action) -> set[tuple[Content, int, int, int]]:
        stage, microbatch = action.stage, action.microbatch
        match action.kind:
            case Kind.FORWARD:
                consumers = self._plan.wiring.consumers(stage)
                return {(Content.ACTIVATION, stage, each, microbatch) for each in consumers}
            case Kind.WEIGHT:
                return set()
        producers = self._plan.wiring.producers(stage)
        return {(Content.GRADIENT, stage, each, microbatch) for each in producers}

    def _stages_of(self, worker: str) -> list[int]:
        return [stage for stage, owners in enumerate(self._plan.owners) if worker in owners]


def _argument(name: str, given: Given) -> tuple[Any, ...]:
    """The values that :class:`~tensorwire.pipeline.wiring.FromStep` of a name stands for."""
    if not name:
        return given.positional
    return (given.positional[int(name)] if name.isdigit() else given.keywords[name],)


def _report(step: Step, worker: str) -> StepReport:
    report = step.replies[worker].wait()
    if report is None:
        raise RuntimeError(f"step {step.order.step} was called off by another thread")
    return report


def _lost_worker(worker: str, error: BaseException) -> str | None:
    """The worker that was lost, if that is what an error of ``worker`` says."""
    if isinstance(error, rpc.WorkerLostError):
        return error.name
    # The worker is there, but is a later life that knows nothing of the pipeline.
    return worker if isinstance(error, StepAbortedError) else None


def _reason(error: BaseException) -> str:
    return str(error) if isinstance(error, rpc.RpcError) else f"{type(error).__name__}: {error}"
