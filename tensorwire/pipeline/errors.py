"""Every error of ``tensorwire.pipeline``, in one tree.

    RuntimeError
    └── PipelineError
        ├── ScheduleError       a table of actions cannot work; also a ValueError
        ├── StageFailedError    a stage raised an error or its worker was lost
        ├── StepAbortedError    this worker's part of a step was called off, as another failed
        └── SupersededError     another driver has the pipeline, or it was formed again

Arguments that cannot be right raise ``TypeError`` and ``ValueError``.
"""

from __future__ import annotations


class PipelineError(RuntimeError):
    """Root of the tree above."""


class ScheduleError(PipelineError, ValueError):
    """A table of actions cannot work."""


class StageFailedError(PipelineError):
    """A stage raised an error, which is the cause of this one, or its worker was lost.

    Attributes:
        stage: its index; of a lost worker that has several, the first.
        worker: the name of its worker.
        microbatch: which one it was working on, or -1 where nobody can tell.
    """

    def __init__(self, stage: int, worker: str, microbatch: int, reason: str) -> None:
        where = f" at micro-batch {microbatch}" if microbatch >= 0 else ""
        super().__init__(f"stage {stage} on worker {worker!r} failed{where}: {reason}")
        self.stage = stage
        self.worker = worker
        self.microbatch = microbatch
        self._reason = reason

    def __reduce__(self) -> tuple[type[StageFailedError], tuple[int, str, int, str]]:
        return type(self), (self.stage, self.worker, self.microbatch, self._reason)


class StepAbortedError(PipelineError):
    """This worker's part of a step was called off because another part failed."""


class SupersededError(PipelineError):
    """A later formation of the pipeline is known: this driver, or this worker, was given up."""
