"""Pipelines: stages of a model on several workers, micro-batches that flow through them.

:class:`Pipeline` is what programs use. Schedules are data: :mod:`~tensorwire.pipeline.schedules`
makes tables of actions, :mod:`~tensorwire.pipeline.validation` checks them and
:mod:`~tensorwire.pipeline.timing` plays them on a virtual clock.
"""

from tensorwire.pipeline.actions import Action, Kind, Table
from tensorwire.pipeline.batches import Batch
from tensorwire.pipeline.errors import (
    PipelineError,
    ScheduleError,
    StageFailedError,
    StepAbortedError,
    SupersededError,
)
from tensorwire.pipeline.grad_scaler import GradScaler
from tensorwire.pipeline.optimizer import PipelineOptimizer
from tensorwire.pipeline.pipeline import Pipeline
from tensorwire.pipeline.randomness import seed_of
from tensorwire.pipeline.schedules import SCHEDULES, Schedule
from tensorwire.pipeline.timing import Costs, Timeline, play, theory
from tensorwire.pipeline.trace import Trace
from tensorwire.pipeline.validation import held_microbatches, validate
from tensorwire.pipeline.wiring import Wiring

__all__ = [
    "SCHEDULES",
    "Action",
    "Batch",
    "Costs",
    "GradScaler",
    "Kind",
    "Pipeline",
    "PipelineError",
    "PipelineOptimizer",
    "Schedule",
    "ScheduleError",
    "StageFailedError",
    "StepAbortedError",
    "SupersededError",
    "Table",
    "Timeline",
    "Trace",
    "Wiring",
    "held_microbatches",
    "play",
    "seed_of",
    "theory",
    "validate",
]
