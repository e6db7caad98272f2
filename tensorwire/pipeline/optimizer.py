"""One optimizer over all stages of a pipeline: a local one per worker, stepped together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from tensorwire.checkpoint.spread import Share
from tensorwire.pipeline import remote_optimizer as remote
from tensorwire.pipeline.arrival import copied
from tensorwire.pipeline.backups.coordinator import Kind
from tensorwire.pipeline.remote_optimizer import GroupRule, Options
from tensorwire.pipeline.shares import OptimizerShare

if TYPE_CHECKING:
    from tensorwire.pipeline.pipeline import Pipeline


class PipelineOptimizer(torch.optim.Optimizer):
    """Made by ``Pipeline.optimizer``; a ``torch.optim.Optimizer`` for all that drives one.

    ``param_groups`` holds the hyperparameters. A change to them, such as by a scheduler of
    ``torch.optim.lr_scheduler``, holds everywhere from the next step on. The parameters are not
    here, but on the stages' workers.

    Raises:
        ValueError: no parameter of the pipeline requires a gradient.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        cls: type[torch.optim.Optimizer],
        options: Options,
        rule: GroupRule,
    ) -> None:
        self._pipeline = pipeline
        self._cls = cls
        self._options = options
        self._rule = rule
        self.key = pipeline.driver.optimizer_key()
        made = pipeline.driver.perform(Kind.ASK, lambda _: self._make())
        own: list[Options] = []
        groups: list[dict[str, Any]] = []
        for each in made.values():
            for said, group in zip(each.own, each.groups, strict=True):
                if said not in own:
                    own.append(said)
                    groups.append({"params": [torch.zeros(0)], **group})
        if not groups:
            raise ValueError("no parameter of the pipeline requires a gradient")
        self._own = own
        defaults = next(each.defaults for each in made.values() if each.groups)
        super().__init__(groups, dict(defaults))
        self._take_places(made)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps the optimizers of all workers, at the same time.

        Args:
            closure: called first; what it returns is returned.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        groups = [copied(_plain(group)) for group in self.param_groups]
        self._pipeline.driver.perform(Kind.STEP, lambda _: self._step(groups))
        return result

    def _step(self, groups: list[Options]) -> None:
        self._pipeline.driver.call_each(
            remote.step_optimizer,
            {worker: (self.key, self._changed(worker, groups)) for worker in self._places},
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all stages."""
        clear = partial(self._pipeline.driver.call_all, remote.zero_gradients, set_to_none)
        self._pipeline.driver.perform(Kind.CHANGE, lambda _: clear())

    def state_dict(self) -> dict[str, Any]:
        """The optimizers' state, by the parameters' names in the pipeline, gathered here."""
        state: dict[str, Any] = {}
        read = partial(self._pipeline.driver.call_all, remote.optimizer_state, self.key)
        for part in self._pipeline.driver.perform(Kind.ASK, lambda _: read()).values():
            state.update(part)
        return {"state": state, "param_groups": [_plain(group) for group in self.param_groups]}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned, also of a pipeline on other workers.

        Raises:
            ValueError: it has another number of groups.
        """
        self.take_groups(state_dict["param_groups"])
        state = copied(dict(state_dict["state"]))
        load = partial(self._pipeline.driver.call_all, remote.load_optimizer_state, self.key, state)
        self._pipeline.driver.perform(Kind.STEP, lambda _: load())

    def checkpoint_shares(self) -> list[Share]:
        """The shares of the state each worker saves and loads; see ``tensorwire.checkpoint``."""
        session = self._pipeline.session
        return [Share(worker, OptimizerShare(session, self.key)) for worker in self._places]

    def checkpoint_common(self) -> list[Options]:
        """The hyperparameters."""
        return [_plain(group) for group in self.param_groups]

    def load_checkpoint_common(self, common: list[Options]) -> None:
        """Takes over hyperparameters.

        Raises:
            ValueError: they are for another number of groups.
        """
        self.take_groups(common)
        self._pipeline.driver.note_loaded()

    def take_groups(self, common: list[Options]) -> None:
        """Takes over hyperparameters that belong to what the stages have.

        Raises:
            ValueError: they are for another number of groups.
        """
        if len(common) != len(self.param_groups):
            raise ValueError(
                f"the state has {len(common)} parameter groups, the optimizer "
                f"{len(self.param_groups)}"
            )
        for mine, theirs in zip(self.param_groups, common, strict=True):
            mine.update(theirs)

    def renew(self) -> None:
        """Makes the local optimizers anew, after workers have come back; their state is lost."""
        self._take_places(self._make())

    def _make(self) -> dict[str, remote.Made]:
        return self._pipeline.driver.call_all(
            remote.make_optimizer, self.key, self._cls, self._options, self._rule
        )

    def _take_places(self, made: Mapping[str, remote.Made]) -> None:
        """Notes which groups each worker has, and which hyperparameters it knows."""
        self._places = {
            worker: [self._own.index(said) for said in each.own] for worker, each in made.items()
        }
        self._sent: dict[str, list[Options]] = {worker: [] for worker in made}

    def _changed(self, worker: str, groups: list[Options]) -> list[Options] | None:
        wanted = [groups[place] for place in self._places[worker]]
        if wanted == self._sent[worker]:
            return None
        self._sent[worker] = wanted
        return wanted


def _plain(group: Options) -> Options:
    """A group's hyperparameters, as they are now."""
    return {name: value for name, value in group.items() if name != "params"}
