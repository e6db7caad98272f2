"""The pipelines that a worker has a part in, and what their drivers may ask of it.

The functions here are called from afar. Each finds the part of this worker by the
pipeline's session; one that is not known here belongs to an earlier life of this worker.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

import rpc
from rpc import extend
from tensorwire.pipeline import clocks, letters
from tensorwire.pipeline.actions import Action
from tensorwire.pipeline.backups import copies, keeping
from tensorwire.pipeline.backups.copies import StageCopy
from tensorwire.pipeline.backups.keeping import Keepers
from tensorwire.pipeline.backups.places import Found, Seat
from tensorwire.pipeline.backups.shelf import Epoch
from tensorwire.pipeline.errors import PipelineError, StepAbortedError
from tensorwire.pipeline.plan import Plan, Progress, Rows, Span, StepOrder, StepReport
from tensorwire.pipeline.returning import wait_for_change
from tensorwire.pipeline.worker import CHANNEL, Outbox, StageWorker

_SECONDS_TO_MEET: Final = 10.0
_SECONDS_TO_END: Final = 600.0
_GONE = extend.MembershipChange.LOST, extend.MembershipChange.LEFT


class Sessions:
    """All pipelines of one worker."""

    def __init__(self, me: extend.Worker) -> None:
        self._me = me
        self._lock = threading.Lock()
        self._workers: dict[str, StageWorker] = {}
        self._endings = [
            me.subscribe(CHANNEL, self._arrived),
            me.on_membership(self._changed),
            me.progress.add_source("pipeline", self._facts),
        ]

    @classmethod
    def here(cls) -> Sessions:
        """The pipelines of the current worker."""
        return extend.worker_state("tensorwire.pipeline", lambda: cls(extend.worker()), cls.close)

    def add(
        self,
        plan: Plan,
        modules: Mapping[int, tuple[nn.Module, torch.device]],
        restored: Mapping[int, StageCopy],
    ) -> None:
        """Takes part in a pipeline from now on."""
        part = StageWorker(plan, modules, Outbox(plan, self._me, self.seek), restored)
        with self._lock:
            self._workers[plan.session] = part

    def find(self, session: str) -> StageWorker:
        """This worker's part of a pipeline.

        Raises:
            StepAbortedError: it has none.
        """
        found = self.seek(session)
        if found is None:
            raise StepAbortedError(
                f"worker {self._me.info.name!r} does not know this pipeline: it is another life of "
                "the worker that did, or the pipeline was closed"
            )
        return found

    def seek(self, session: str) -> StageWorker | None:
        """This worker's part of a pipeline, if it has one."""
        with self._lock:
            return self._workers.get(session)

    def drop(self, session: str, reason: str) -> None:
        """Leaves a pipeline."""
        with self._lock:
            part = self._workers.pop(session, None)
        if part is not None:
            part.close(reason)

    def end(self, pipeline: str) -> None:
        """Leaves all formations of a pipeline; returns when nothing of them runs here.

        Raises:
            PipelineError: a stage computes for longer than one can wait.
        """
        with self._lock:
            ended = {s: p for s, p in self._workers.items() if p.plan.keep.pipeline == pipeline}
        for session, part in ended.items():
            part.close("the pipeline is formed again")
            if not part.inbox.wait_until_idle(_SECONDS_TO_END):
                raise PipelineError(
                    f"worker {self._me.info.name!r} computes a stage of pipeline {pipeline!r} for "
                    f"more than {_SECONDS_TO_END} seconds, so the pipeline cannot go on"
                )
            self.drop(session, "the pipeline is formed again")

    def close(self) -> None:
        """Leaves all pipelines, as the worker shuts down."""
        for end in self._endings:
            end()
        with self._lock:
            sessions = list(self._workers)
        for session in sessions:
            self.drop(session, "the worker shuts down")

    def _facts(self) -> dict[str, object]:
        """The facts about the stages here; of several pipelines, the one that was last formed."""
        with self._lock:
            parts = list(self._workers.values())
        return parts[-1].facts() if parts else {}

    def _arrived(self, sender: extend.Life, body: bytes, tensors: list[torch.Tensor]) -> None:
        session, address, value = letters.read(body, tensors)
        if (part := self.seek(session)) is not None:
            part.inbox.put(address, value)

    def _changed(self, event: extend.MembershipEvent) -> None:
        if event.change not in _GONE:
            return
        lost = extend.Life(event.worker.id, event.incarnation)
        with self._lock:
            orphans = [name for name, part in self._workers.items() if part.plan.driver == lost]
        for session in orphans:
            self.drop(session, f"its driver {event.worker.name!r} is gone")


def join(session: str, plan: Plan, modules: Mapping[int, tuple[rpc.RRef[nn.Module], str]]) -> None:
    """Takes part in a pipeline with these stages, each a module and its device.

    Raises:
        SupersededError: a later formation is known here.
    """
    keep = plan.keep
    wait_for_change(lambda: all(map(_is_known, keep.lives.values())), _SECONDS_TO_MEET)
    Keepers.here().held_by(keep.pipeline, plan.driver, keep.keep_for).enter(keep.epoch)
    here = {
        index: (module.local_value(), torch.device(device))
        for index, (module, device) in modules.items()
    }
    me = extend.worker().info.name
    seats = {index: Seat(index, plan.owners[index].index(me)) for index in here}
    restored = keeping.restored(keep, seats)
    for index, copied in restored.items():
        copies.restore(copied, here[index][0])
    Sessions.here().add(plan, here, restored)


def _is_known(life: extend.Life) -> bool:
    """Says whether this worker has heard of a life, which may be over already."""
    if extend.is_living(life):
        return True
    latest = extend.worker().latest_life(life.worker)
    return latest is not None and latest.incarnation >= life.incarnation


def gather(pipeline: str, epoch: Epoch, begins: bool) -> Found:
    """Obeys an epoch from now on; returns which copies are here.

    Raises:
        SupersededError: a later one is known here.
    """
    keeper = Keepers.here().of(pipeline)
    keeper.enter(epoch)
    Sessions.here().end(pipeline)
    if begins:
        keeper.clear(epoch)
    return keeper.found()


def kept(session: str) -> bytes:
    """The driver's own state that was copied with the stage 0 that is here."""
    return Sessions.here().find(session).restored[0].rest.kept


def cut(session: str, version: int, kept: bytes) -> None:
    """Copies this worker's stages, and returns when their backups have the copies."""
    Sessions.here().find(session).begin_cut(version, kept).finish()


def leave(session: str) -> None:
    """Takes no part in a pipeline any more."""
    Sessions.here().drop(session, "the pipeline was closed")


def install(session: str, rows: Rows, actions: tuple[Action, ...]) -> None:
    """Keeps this worker's row of a table."""
    Sessions.here().find(session).install(rows, actions)


def run(session: str, order: StepOrder) -> StepReport | None:
    """Does this worker's part of a step; None if that was called off, which is nobody's error."""
    part = Sessions.here().find(session)
    try:
        return part.run(order)
    except StepAbortedError:
        return None


def abort(session: str, step: int, last: int, reason: str) -> Progress | None:
    """Calls off all steps until ``last``; None if this worker has no part in the pipeline.

    Returns:
        How far this worker got in ``step``.
    """
    part = Sessions.here().seek(session)
    return None if part is None else part.abort(step, last, reason)


def spans(session: str) -> list[Span]:
    """The times when this worker did each action of its last step."""
    return Sessions.here().find(session).spans


def parameter_names(module: rpc.RRef[nn.Module]) -> list[str]:
    """The names of a module's parameters."""
    return [name for name, _ in module.local_value().named_parameters()]


def state_names(module: rpc.RRef[nn.Module]) -> list[str]:
    """The names of a module's parameters and buffers."""
    return list(module.local_value().state_dict())


def read_parameters(session: str, stage: int, names: tuple[str, ...]) -> list[torch.Tensor]:
    """The values of some parameters and buffers of a stage, on the CPU."""
    state: dict[str, Any] = Sessions.here().find(session).stages[stage].module.state_dict()
    return [state[name].cpu() for name in names]


def set_parameters(
    session: str, stage: int, names: tuple[str, ...], values: list[torch.Tensor]
) -> None:
    """Overwrites parameters and buffers of a stage."""
    state: dict[str, Any] = Sessions.here().find(session).stages[stage].module.state_dict()
    with torch.no_grad():
        for name, value in zip(names, values, strict=True):
            state[name].copy_(value)


def read_clock() -> clocks.Reading:
    """Reads this worker's clock."""
    return clocks.read()


def memory(session: str) -> int:
    """The bytes that this worker's stages take: of their GPU, or else all of the process."""
    stages = Sessions.here().find(session).stages.values()
    gpus = {stage.device for stage in stages if stage.device.type == "cuda"}
    if gpus:
        return sum(torch.cuda.memory_allocated(each) for each in gpus)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
