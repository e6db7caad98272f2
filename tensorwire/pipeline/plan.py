"""Instructions to workers of a pipeline: once, what the pipeline is; for each step, what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from rpc import extend
from tensorwire.pipeline.actions import Action
from tensorwire.pipeline.backups.keeping import Keep
from tensorwire.pipeline.letters import Address
from tensorwire.pipeline.stage import StageSettings
from tensorwire.pipeline.wiring import Wiring

Loss = Callable[[Any, Any], torch.Tensor]
"""Computes the loss of a micro-batch from the last stage's output and the target."""


@dataclass(frozen=True, slots=True)
class Member:
    """Parameters of one stage on one worker, whose gradients are summed with other members'.

    Args:
        worker: its name.
        stage: whose parameters they are.
        names: of the parameters.
    """

    worker: str
    stage: int
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """Parameters that must stay equal: tied weights, or the replicas of a stage.

    Args:
        members: each with as many parameters, which correspond in order.
    """

    members: tuple[Member, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """A pipeline, as all its workers know it.

    Args:
        session: names this pipeline, in this life of its workers, among all.
        driver: who calls ``train_step``.
        wiring: how the stages are connected.
        owners: the names of each stage's workers.
        prefixes: of each stage's parameters, which make their names unique.
        lives: of all workers by name.
        settings: of each stage.
        loss: of the last stage's output; None in a pipeline that does not train.
        shared: parameters that stay equal.
        outputs_to_cpu: the driver has no device map for the last stage's outputs.
        keep: which copies of stages are made and gone back to.
    """

    session: str
    driver: extend.Life
    wiring: Wiring
    owners: tuple[tuple[str, ...], ...]
    prefixes: tuple[str, ...]
    lives: Mapping[str, extend.Life]
    settings: tuple[StageSettings, ...]
    loss: Loss | None
    shared: tuple[Sharing, ...]
    outputs_to_cpu: bool
    keep: Keep


@dataclass(frozen=True, slots=True)
class Rows:
    """Names a table that workers were given: for training or not, and of how many micro-batches."""

    trains: bool
    microbatches: int


@dataclass(frozen=True, slots=True)
class StepOrder:
    """One step, as the driver orders it.

    Args:
        step: its number.
        rows: which table.
        drawn: what random numbers depend on besides the seed: the number of steps done before.
        weights: what each micro-batch's loss counts for.
        scale: what all gradients are multiplied with.
        cut: the version that is copied to backups meanwhile; None: none.
        kept: the driver's own state, which is copied with stage 0.
    """

    step: int
    rows: Rows
    drawn: int
    weights: tuple[float, ...] = ()
    scale: float = 1.0
    cut: int | None = None
    kept: bytes = b""


@dataclass(frozen=True, slots=True)
class Span:
    """The times when a worker did an action, in nanoseconds of its monotonic clock.

    Args:
        action: what.
        waited: since when it waited for the action's inputs.
        began: when it had them.
        ended: when it was done.
    """

    action: Action
    waited: int
    began: int
    ended: int

    def shifted(self, nanoseconds: int) -> Span:
        """The same on a clock that is ahead by so much."""
        moments = (each + nanoseconds for each in (self.waited, self.began, self.ended))
        return Span(self.action, *moments)


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of a worker when its part of a step is done.

    Args:
        losses: of micro-batches, without weights and scale; only of the last stage's workers.
        outputs: of the last stage for micro-batches, if the step does not train.
        most_held: for each stage here, how many micro-batches it held at most.
    """

    losses: Mapping[int, torch.Tensor] = field(default_factory=dict)
    outputs: Mapping[int, Any] = field(default_factory=dict)
    most_held: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a worker in a step that was called off.

    Args:
        failed: the action that raised an error here, if one did.
        arrived: the letters that had come.
    """

    failed: Action | None
    arrived: frozenset[Address]
