"""Forward and backward passes of a pipeline: training, evaluation, streams, and their times."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

import rpc
from tensorwire.pipeline import sessions
from tensorwire.pipeline.backups.carrying_out import Carrier
from tensorwire.pipeline.backups.coordinator import Kind, Operation
from tensorwire.pipeline.backups.placing import seconds_of
from tensorwire.pipeline.clocks import offset
from tensorwire.pipeline.formation import Design
from tensorwire.pipeline.microbatches import Given, rows_of, split
from tensorwire.pipeline.plan import Rows, Span, StepOrder, StepReport
from tensorwire.pipeline.reduction import BatchLoss
from tensorwire.pipeline.steps import Step
from tensorwire.pipeline.trace import Trace


class Passes:
    """The steps of one pipeline.

    Args:
        carrier: runs operations, from backups if workers are lost.
        design: of the pipeline.

    Attributes:
        most_held: by stage, the most micro-batches it held at once in the last training step.
    """

    def __init__(self, carrier: Carrier, design: Design) -> None:
        self._carrier = carrier
        self._design = design
        self.most_held: dict[int, int] = {}

    def train(self, given: list[Given], loss: BatchLoss, scale: float, kept: bytes) -> torch.Tensor:
        """Trains with a batch; returns its loss.

        Args:
            given: the micro-batches.
            loss: of the batch.
            scale: of the gradients.
            kept: the driver's own state, for the backup of stage 0.
        """
        weights, keeps = loss.weights([rows_of(each) for each in given]), self._carrier.backups > 0
        if keeps:  # what the loop does with its batch is its own business
            given = [each.copied() for each in given]
        train = _Training(self._carrier, given, weights, scale, keeps)
        reports = self._carrier.perform(Kind.TRAIN, train, kept)
        self.most_held = {at: n for each in reports.values() for at, n in each.most_held.items()}
        losses = {at: loss for each in reports.values() for at, loss in each.losses.items()}
        return torch.stack([losses[at] * weight for at, weight in enumerate(weights)]).sum()

    def evaluate(self, given: Sequence[Given]) -> list[Any]:
        """The last stage's output for each micro-batch."""
        outputs: list[Any] = self._ask(lambda _: self._outputs(self._begin(given)))
        return outputs

    def stream(self, batches: Iterable[Any], in_flight: int) -> Iterator[Any]:
        """Evaluates batches, each as one micro-batch, so many of them at the same time."""
        under_way: deque[Step] = deque()
        try:
            for batch in batches:
                arguments = batch if isinstance(batch, tuple) else (batch,)
                under_way.append(self._begin(split(arguments, {}, None, 1)))
                if len(under_way) >= in_flight:
                    yield self._outputs(under_way.popleft(), under_way)[0]
            while under_way:
                yield self._outputs(under_way.popleft(), under_way)[0]
        except GeneratorExit:
            if under_way:
                self._carrier.formation.steps.abort(
                    list(under_way), "nobody wants the rest of the stream"
                )
            raise

    def require_keywords(self, keywords: Mapping[str, Any]) -> None:
        """Raises ``ValueError`` unless a step got the keyword arguments that stages take."""
        wanted = {
            name
            for stage in range(self._design.wiring.stages)
            for name in self._design.wiring.keywords(stage)
            if name and not name.isdigit()
        }
        if wanted != set(keywords):
            raise ValueError(
                f"the stages take the keyword arguments {sorted(wanted)}, but the step got "
                f"{sorted(keywords)}; inputs= says which stage takes which"
            )

    # --- Times

    def trace(self) -> Trace | None:
        """The times of each worker's actions in the last step; None if there was none."""
        by_worker = self._spans()
        if not any(by_worker.values()):
            return None
        shifted = {}
        for worker, spans in by_worker.items():
            ahead = offset(partial(rpc.rpc_sync, worker, sessions.read_clock))
            shifted[worker] = [span.shifted(-ahead) for span in spans]
        return Trace(shifted, self._design.wiring)

    def seconds(self) -> list[float]:
        """The seconds that each stage took in the last step."""
        spans = self._spans().values()
        return seconds_of(len(self._design.stages), [span for each in spans for span in each])

    def _spans(self) -> dict[str, list[Span]]:
        spans: dict[str, list[Span]] = self._ask(
            lambda _: self._carrier.formation.call_all(sessions.spans)
        )
        return spans

    # --- Shared by the above

    def _ask(self, work: Callable[[Operation], Any]) -> Any:
        return self._carrier.perform(Kind.ASK, work, None)

    def _begin(self, given: Sequence[Any]) -> Step:
        rows = self._carrier.formation.rows(False, len(given))
        order = StepOrder(
            self._carrier.formation.next_step(),
            Rows(False, len(given)),
            self._carrier.coordinator.trained,
        )
        return self._carrier.formation.steps.begin(order, rows, given)

    def _outputs(self, step: Step, later: Iterable[Step] = ()) -> list[Any]:
        reports = self._carrier.formation.steps.finish(step, later).values()
        outputs = {at: output for each in reports for at, output in each.outputs.items()}
        return [outputs[at] for at in range(len(outputs))]


@dataclass(frozen=True, slots=True)
class _Training:
    """One training step, which can be done again.

    Args:
        carrier: has the formation that does it.
        given: the micro-batches.
        weights: of each.
        scale: of the gradients.
        keeps: the micro-batches are needed again, whatever the stages do with them.
    """

    carrier: Carrier
    given: list[Given]
    weights: tuple[float, ...]
    scale: float
    keeps: bool

    def __call__(self, operation: Operation) -> dict[str, StepReport]:
        formation, count = self.carrier.formation, len(self.given)
        rows = formation.rows(True, count)
        order = StepOrder(
            formation.next_step(), Rows(True, count), operation.drawn, self.weights, self.scale,
            operation.cut, operation.kept or b"",
        )  # fmt: skip
        given = [each.copied() for each in self.given] if self.keeps else self.given
        return formation.steps.finish(formation.steps.begin(order, rows, given))
