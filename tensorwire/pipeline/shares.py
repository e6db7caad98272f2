"""The shares that each worker of a pipeline saves in checkpoints and loads from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tensorwire.checkpoint.fitting import (
    Fit,
    about_optimizer,
    fit_of_optimizer,
    fit_of_tensors,
    is_of_another_class,
)
from tensorwire.checkpoint.spread import Names, load_module
from tensorwire.pipeline import remote_optimizer
from tensorwire.pipeline.sessions import Sessions


@dataclass(frozen=True, slots=True)
class ModelShare:
    """The stages of one worker, by the parameters' names in the pipeline.

    Of a stage with replicas, the first saves and all load.
    """

    session: str

    def save(self) -> Mapping[str, Any]:
        """The stages' parameters and buffers."""
        part = Sessions.here().find(self.session)
        plan = part.plan
        return {
            plan.prefixes[index] + name: value
            for index, stage in part.stages.items()
            if plan.owners[index][0] == part.outbox.name
            for name, value in stage.module.state_dict().items()
        }

    def check(self, values: Names) -> Fit:
        """Compares saved values with the stages here."""
        part = Sessions.here().find(self.session)
        fits = [
            fit_of_tensors(stage.module.state_dict(), values, part.plan.prefixes[index])
            for index, stage in part.stages.items()
        ]
        return Fit(
            frozenset(name for fit in fits for name in fit.taken),
            tuple(each for fit in fits for each in fit.conversions),
            tuple(each for fit in fits for each in fit.misfits),
        )

    def load(self, values: Names) -> None:
        """Copies saved values into the stages."""
        part = Sessions.here().find(self.session)
        for index, stage in part.stages.items():
            load_module(stage.module, part.plan.prefixes[index], values)


@dataclass(frozen=True, slots=True)
class OptimizerShare:
    """The state of one worker's optimizer, by the parameters' names in the pipeline."""

    session: str
    key: str

    def save(self) -> Mapping[str, Any]:
        """The state of each parameter; of those of replicas, only at the first."""
        part = Sessions.here().find(self.session)
        firsts = {
            part.plan.prefixes[index] + name
            for index, stage in part.stages.items()
            if part.plan.owners[index][0] == part.outbox.name
            for name, _ in stage.module.named_parameters()
        }
        state = remote_optimizer.optimizer_state(self.session, self.key)
        kept = {name: each for name, each in state.items() if name in firsts}
        about = about_optimizer(part.optimizers.get(self.key), self._shapes())
        return kept if self.key not in part.optimizers else about | kept

    def _shapes(self) -> dict[str, list[int]]:
        parameters = Sessions.here().find(self.session).named_parameters()
        return {name: list(each.shape) for name, each in parameters.items()}

    def check(self, values: Names) -> Fit:
        """Compares the optimizer here with the one whose state was saved."""
        optimizer = Sessions.here().find(self.session).optimizers.get(self.key)
        return Fit() if optimizer is None else fit_of_optimizer(optimizer, self._shapes(), values)

    def load(self, values: Names) -> None:
        """Takes over the state of the parameters that are here."""
        part = Sessions.here().find(self.session)
        if is_of_another_class(part.optimizers.get(self.key), values):
            return
        mine = {name: values[name] for name in part.named_parameters() if name in values}
        remote_optimizer.load_optimizer_state(self.session, self.key, mine)
