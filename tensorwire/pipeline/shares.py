"""The shares that each worker of a pipeline saves in checkpoints and loads from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
        return {name: kept for name, kept in state.items() if name in firsts}

    def load(self, values: Names) -> None:
        """Takes over the state of the parameters that are here."""
        part = Sessions.here().find(self.session)
        found = {name: values[name] for name in part.named_parameters() if name in values}
        remote_optimizer.load_optimizer_state(self.session, self.key, found)
