"""The driver's side of one pipeline: operations over its workers, and the state it keeps itself."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tensorwire.pipeline import remote_optimizer, sessions
from tensorwire.pipeline.backups.carrying_out import Carrier
from tensorwire.pipeline.backups.coordinator import Coordinator, Kind, Operation
from tensorwire.pipeline.backups.driver_state import DriverPlaces, Kept
from tensorwire.pipeline.backups.placing import moved, rebalanced
from tensorwire.pipeline.formation import Design, Formation
from tensorwire.pipeline.parameters import norm_of
from tensorwire.pipeline.returning import wait_for_workers

if TYPE_CHECKING:
    from tensorwire.pipeline.optimizer import PipelineOptimizer


class Driver:
    """Runs operations on a pipeline's workers. One thread uses it; it has no lock.

    Args:
        design: of the pipeline.
        name: under which a later life of the driver finds it; None for none.
        backups: how many each stage has: 0 or 1.
        spares: workers without stages that may take some.
        keep_for: seconds for which copies outlive the driver.
        wait_for_return: seconds to wait for a lost worker before another takes its stages.

    Attributes:
        is_named: whether a later life of the driver finds the pipeline.
        places: of the loops over data.
        carrier: carries out what is decided when workers are lost.
    """

    def __init__(
        self,
        design: Design,
        name: str | None,
        backups: int,
        spares: Sequence[str],
        keep_for: float,
        wait_for_return: float,
    ) -> None:
        self.is_named = name is not None
        self.places = DriverPlaces()
        self.carrier = Carrier(
            design, self._renew, name, backups, spares, keep_for, wait_for_return
        )
        self._design = design
        self._optimizers: weakref.WeakSet[PipelineOptimizer] = weakref.WeakSet()
        self._made_optimizers = 0

    def begin(self) -> None:
        """Forms the pipeline, or goes on where an earlier life of the driver was."""
        self.carrier.begin()
        if self.carrier.resumed is None:
            return
        (data,) = self.call_each(sessions.kept, {self.formation.plan.owners[0][0]: ()}).values()
        kept: Kept = pickle.loads(data)
        self.coordinator.trained = kept.steps
        self.places.go_on_at(kept.place)

    @property
    def formation(self) -> Formation:
        """The present one."""
        return self.carrier.formation

    @property
    def coordinator(self) -> Coordinator:
        """Decides where stages are, and counts steps."""
        return self.carrier.coordinator

    def kept(self) -> bytes:
        """The driver's own state, which is backed up with stage 0."""
        return pickle.dumps(Kept(self.coordinator.trained, self.places.now))

    # --- operations

    def perform(self, kind: Kind, work: Callable[[Operation], Any]) -> Any:
        """Does an operation with the stages; with backups, whoever is lost meanwhile.

        Args:
            kind: what a failed one leaves behind.
            work: does it, and may be called again.
        """
        return self.carrier.perform(kind, work, self.kept() if kind is Kind.TRAIN else None)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Calls ``function(session, *arguments)`` on every worker; returns what each returns."""
        return self.formation.call_all(function, *arguments)

    def call_each(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Calls ``function(session, *arguments[worker])`` on these workers, at the same time."""
        return self.formation.call_each(function, arguments)

    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> torch.Tensor:
        """Scales the gradients of all stages, if their norm is more; returns the norm before."""
        norms_of = remote_optimizer.gradient_norms
        norms = self.perform(Kind.ASK, lambda _: self.call_all(norms_of, norm_type)).values()
        total = norm_of(len(self._design.stages), norms, norm_type, error_if_nonfinite)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        scale = partial(self.call_all, remote_optimizer.scale_gradients, float(factor))
        self.perform(Kind.CHANGE, lambda _: scale())
        return total

    def note_loaded(self) -> None:
        """Notes that a checkpoint was loaded, which backups do not have until the next step."""
        self.coordinator.note("a checkpoint was loaded")

    # --- optimizers

    @property
    def optimizers(self) -> dict[str, PipelineOptimizer]:
        """The optimizers that are in use, by their keys."""
        return dict(sorted((each.key, each) for each in self._optimizers))

    def optimizer_key(self) -> str:
        """Names the next optimizer, the same in each life of the driver."""
        self._made_optimizers += 1
        return str(self._made_optimizers - 1)

    def add(self, optimizer: PipelineOptimizer) -> None:
        """Makes an optimizer anew, for as long as it is in use, where stages are made anew."""
        self._optimizers.add(optimizer)

    def _renew(self) -> None:
        for optimizer in self._optimizers:
            optimizer.renew()

    # --- places of stages

    def form_again(self) -> None:
        """Begins a session with the workers that are there now, and optimizers made anew."""
        self.formation.leave()
        self.carrier.form()

    def recover(self, timeout: float) -> None:
        """Waits for lost workers, and makes their stages anew.

        Args:
            timeout: seconds, for all of them to be back.
        """
        lost = self.formation.lost()
        wait_for_workers(lost, timeout)
        for index, replicas in enumerate(self._design.stages):
            for replica, owner in zip(replicas, self.formation.plan.owners[index], strict=True):
                if owner in lost:
                    replica.recreate()
        self.form_again()
        self.coordinator.note("the pipeline was made anew with recover()")

    def go_home(self) -> None:
        """Gives stages back to workers that have come back."""
        self.carrier.go_home(self.kept())

    def move(self, stage: int, worker: str, replica: int) -> None:
        """Puts a stage on another worker, state and all."""
        owners = moved(self._design, self.coordinator.owners, stage, worker, replica)
        self.carrier.move(owners, owners, self.kept())

    def rebalance(self, seconds: Sequence[float], workers: Sequence[str] | None) -> list[str]:
        """Deals stages out anew; returns the worker of each.

        Args:
            seconds: that each stage takes.
            workers: in order; None for those that have stages.
        """
        coordinator = self.coordinator
        owners = rebalanced(self._design, coordinator.homes, seconds, workers)
        homes = owners if workers or not coordinator.missing else coordinator.homes
        if owners != coordinator.owners:
            self.carrier.move(owners, homes, self.kept())
        return [replicas[0] for replicas in coordinator.owners]

    def close(self) -> None:
        """Has the workers forget the pipeline and its backups."""
        self.carrier.close()
