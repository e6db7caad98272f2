"""``Pipeline``: stages of a model on several workers, trained together.

Owns what the driver knows: where the stages are, which table to use, the number of the next
step. How steps run is the business of ``steps`` here and of ``worker`` there.
"""

from __future__ import annotations

import uuid
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import rpc
from optim_dist.clipping import total_norm
from remote_module import RemoteModule
from rpc import extend
from tensorwire.checkpoint.spread import Share
from tensorwire.pipeline import remote_optimizer, sessions
from tensorwire.pipeline.actions import Action, Table
from tensorwire.pipeline.errors import ScheduleError
from tensorwire.pipeline.microbatches import merge, rows_of, split
from tensorwire.pipeline.optimizer import PipelineOptimizer
from tensorwire.pipeline.placement import choose_table, fit, workers_of
from tensorwire.pipeline.plan import Loss, Plan, Rows, StepOrder
from tensorwire.pipeline.remote_optimizer import GroupRule
from tensorwire.pipeline.schedules import SCHEDULES, Schedule, forward_only
from tensorwire.pipeline.sessions import Sessions
from tensorwire.pipeline.shares import ModelShare
from tensorwire.pipeline.sharing import Tie, make_equal, plan_sharing
from tensorwire.pipeline.stage import StageSettings
from tensorwire.pipeline.steps import Step, Steps
from tensorwire.pipeline.validation import validate
from tensorwire.pipeline.wiring import Told, Wiring
from tensorwire.pipeline.worker import Outbox

if TYPE_CHECKING:
    from typing_extensions import Self

Stages = Sequence["RemoteModule | Sequence[RemoteModule]"]


class Pipeline:
    """Stages of a model, each a ``RemoteModule``, trained on micro-batches that flow through.

    Args:
        stages: in order. A list in place of one module makes replicas of a stage, to which
            micro-batches are dealt out in turn.
        schedule: the name of a known one (``SCHEDULES``), a function like those, a table of
            your own or the path of a file with one.
        microbatches: how many a batch is split into.
        loss: of the last stage's output and the target of a micro-batch, its mean over rows.
        inputs: the sources of a stage's arguments, where these are not just the outputs of
            the stage before: see :class:`Wiring`.
        tied: groups of parameters that stay equal, each named by its stage and its name
            there, as in ``[((0, "embedding.weight"), (2, "head.weight"))]``.
        recompute: stages that keep only their inputs and run forward passes again; True: all.
        autocast: the dtype of ``torch.autocast`` in forward passes.
        seed: of random numbers in forward passes, which then depend on it, the step, the stage
            and the micro-batch alone.

    Raises:
        ScheduleError: the schedule does not fit the stages, or its table cannot work.
        TypeError: an argument is of another type.
        ValueError: a connection or a tie names what is not there.

    Example::

        pipe = Pipeline(
            [RemoteModule("stage:0", Embed), RemoteModule("stage:1", Head)],
            schedule="1f1b", microbatches=8, loss=nn.CrossEntropyLoss())
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-4)
        for x, y in loader:
            loss = pipe.train_step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        stages: Stages,
        schedule: str | Path | Table | Schedule = "1f1b",
        microbatches: int = 4,
        loss: Loss | None = None,
        *,
        inputs: Mapping[int, Sequence[Told]] | None = None,
        tied: Sequence[Tie] = (),
        recompute: bool | Collection[int] = False,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
    ) -> None:
        self._stages = _as_replicas(stages)
        self._wiring = Wiring.chain(len(self._stages), inputs)
        self._schedule = _as_schedule(schedule)
        self._microbatches = _require_positive("microbatches", microbatches)
        self._loss = loss
        self._tied = tied
        self._settings = tuple(
            StageSettings(
                recompute if isinstance(recompute, bool) else index in recompute, autocast, seed
            )
            for index in range(len(self._stages))
        )
        self._step = 0
        self._trained = 0
        self._optimizers: weakref.WeakSet[PipelineOptimizer] = weakref.WeakSet()
        self._most_held: dict[int, int] = {}
        self._form()
        if loss is not None:
            self.table(microbatches)

    @property
    def stages(self) -> list[RemoteModule]:
        """The stages' modules; of replicas, the first."""
        return [replicas[0] for replicas in self._stages]

    @property
    def replicas(self) -> list[list[RemoteModule]]:
        """The modules of each stage, all replicas."""
        return [list(replicas) for replicas in self._stages]

    @property
    def workers(self) -> list[str]:
        """The names of the workers, in the order of their stages."""
        return workers_of(self._plan.owners)

    @property
    def session(self) -> str:
        """Names this pipeline among all, in this life of its workers."""
        return self._plan.session

    @property
    def steps(self) -> int:
        """How many training steps were done; with ``seed``, random numbers depend on it."""
        return self._trained

    @property
    def most_held(self) -> dict[int, int]:
        """How many micro-batches' activations each stage held at most in the last step."""
        return dict(sorted(self._most_held.items()))

    def table(self, microbatches: int | None = None) -> Table:
        """The actions of each worker, in order, in a step of so many micro-batches.

        Raises:
            ScheduleError: the schedule cannot serve as many.
        """
        return Table.of(self._rows(True, microbatches or self._microbatches).values())

    def train_step(
        self, *positional: Any, target: Any, scale: float = 1.0, **keywords: Any
    ) -> torch.Tensor:
        """Runs forward and backward passes of all micro-batches of a batch.

        Gradients add to the stages' ``grad``. If the step fails, they are as before it.

        Args:
            positional: for the first stage. Tensors are split along their first dimension; a
                list is taken as ready micro-batches, which may differ in shape.
            target: what the loss compares with, split likewise.
            scale: what the gradients are multiplied with.
            keywords: arguments that ``inputs`` names.

        Returns:
            The mean loss over the rows of the batch.

        Raises:
            StageFailedError: a stage raised an error, or its worker was lost.
            ValueError: the batch cannot be split, or an argument is missing or too many.
        """
        if self._loss is None:
            raise ValueError("loss=None: a pipeline trains only with a loss")
        self._require_keywords(keywords)
        given = split(positional, keywords, target, self._microbatches)
        rows = [rows_of(each) for each in given]
        weights = tuple(each / sum(rows) for each in rows)
        step = self._begin(True, given, weights, scale)
        reports = self._steps.finish(step)
        self._trained += 1
        self._most_held = {at: n for each in reports.values() for at, n in each.most_held.items()}
        losses = {at: loss for each in reports.values() for at, loss in each.losses.items()}
        return torch.stack([losses[at] * weight for at, weight in enumerate(weights)]).sum()

    def eval_step(self, *positional: Any, **keywords: Any) -> Any:
        """Runs forward passes in evaluation mode, without gradients.

        Args:
            positional: as for :meth:`train_step`.
            keywords: as for :meth:`train_step`.

        Returns:
            What the last stage returns, for the whole batch; of ready micro-batches, a list.

        Raises:
            StageFailedError: a stage raised an error, or its worker was lost.
            ValueError: the batch cannot be split, or an argument is missing or too many.
        """
        self._require_keywords(keywords)
        given = split(positional, keywords, None, self._microbatches)
        outputs = self._outputs(self._begin(False, given))
        ready = any(isinstance(each, list) for each in (*positional, *keywords.values()))
        return outputs if ready else merge(outputs)

    def stream(self, batches: Iterable[Any], in_flight: int | None = None) -> Iterator[Any]:
        """Evaluates many batches, each as one micro-batch, and keeps the pipe full meanwhile.

        Args:
            batches: each the argument of the first stage, or a tuple of its arguments.
            in_flight: how many are under way at most; default two per worker.

        Yields:
            What the last stage returns for each batch, in order.

        Raises:
            StageFailedError: a stage raised an error, or its worker was lost.
        """
        most = _require_positive("in_flight", in_flight or 2 * len(self.workers))
        under_way: deque[Step] = deque()
        try:
            for batch in batches:
                arguments = batch if isinstance(batch, tuple) else (batch,)
                under_way.append(self._begin(False, split(arguments, {}, None, 1)))
                if len(under_way) >= most:
                    yield self._outputs(under_way.popleft(), under_way)[0]
            while under_way:
                yield self._outputs(under_way.popleft(), under_way)[0]
        except GeneratorExit:
            if under_way:
                self._steps.abort(list(under_way), "nobody wants the rest of the stream")
            raise

    def optimizer(
        self,
        cls: type[torch.optim.Optimizer],
        groups: GroupRule | None = None,
        **options: Any,
    ) -> PipelineOptimizer:
        """Makes an optimizer of all parameters that require gradients, local to each worker.

        Args:
            cls: a class of ``torch.optim``, or one like it.
            groups: called where each parameter is, with its name (``"1.norm.weight"`` in stage 1)
                and itself; returns hyperparameters that it has apart from the others, such as
                ``{"weight_decay": 0.0}``. Each different answer is a parameter group.
            options: what ``cls`` takes besides parameters.

        Raises:
            ValueError: no parameter requires a gradient.

        Example::

            optimizer = pipe.optimizer(torch.optim.AdamW, lr=3e-4, weight_decay=0.1)
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        """
        made = PipelineOptimizer(self, cls, options, groups or _no_options)
        self._optimizers.add(made)
        return made

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """As ``torch.nn.utils.clip_grad_norm_``, over the parameters of all stages.

        Args:
            max_norm: gradients are scaled such that their norm is no more than this.
            norm_type: which norm.
            error_if_nonfinite: raise an error if the norm is infinite or no number.

        Returns:
            The norm of all gradients together, before they were clipped.

        Raises:
            RuntimeError: the norm is infinite or no number, and ``error_if_nonfinite`` is set.
        """
        found = self.call_all(remote_optimizer.gradient_norms, norm_type).values()
        norms = [
            norm
            for stage in range(len(self._stages))
            for each in found
            for norm in each.get(stage, ())
        ]
        total = total_norm(norms, norm_type, error_if_nonfinite)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        self.call_all(remote_optimizer.scale_gradients, float(factor))
        return total

    def state_dict(self) -> dict[str, Any]:
        """All parameters and buffers by their names in the pipeline, gathered here.

        A stage's own names have its number before them: ``"1.norm.weight"``. To save a model
        without gathering it, use ``tensorwire.checkpoint``.
        """
        state: dict[str, Any] = {}
        for stage, prefix in zip(self.stages, self._plan.prefixes, strict=True):
            state.update({prefix + name: each for name, each in stage.state_dict().items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned, in all replicas.

        Raises:
            RuntimeError: names are missing or too many.
        """
        rest = dict(state_dict)
        for replicas, prefix in zip(self._stages, self._plan.prefixes, strict=True):
            names = [name for name in rest if name.startswith(prefix)]
            own = {name.removeprefix(prefix): rest.pop(name) for name in names}
            for replica in replicas:
                replica.load_state_dict(own)
        if rest:
            raise RuntimeError(f"no stage has what the state has: {sorted(rest)}")

    def checkpoint_shares(self) -> list[Share]:
        """What each worker saves and loads of the model; see ``tensorwire.checkpoint``."""
        return [Share(worker, ModelShare(self._plan.session)) for worker in self.workers]

    def checkpoint_common(self) -> dict[str, int]:
        """What no worker has: the number of steps."""
        return {"steps": self._trained}

    def load_checkpoint_common(self, common: dict[str, int]) -> None:
        """Goes on counting steps from a checkpoint's number, on which random numbers depend."""
        self._trained = common["steps"]

    def train(self, mode: bool = True) -> Self:
        """Puts all stages into training mode, or with ``mode=False`` into evaluation mode."""
        for module in self._modules():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Puts all stages into evaluation mode."""
        return self.train(False)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Calls ``function(session, *arguments)`` on every worker; returns what each returns."""
        return self.call_each(function, dict.fromkeys(self.workers, arguments))

    def call_each(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Calls ``function(session, *arguments[worker])`` on these workers, at the same time."""
        calls = {
            worker: rpc.rpc_async(worker, function, (self._plan.session, *each))
            for worker, each in arguments.items()
        }
        return {worker: call.wait() for worker, call in calls.items()}

    def close(self) -> None:
        """Has the workers forget the pipeline; the stages' modules stay."""
        self.call_all(sessions.leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _form(self) -> None:
        """Has all workers take part."""
        owners = tuple(
            tuple(replica.get_module_rref().owner_name() for replica in replicas)
            for replicas in self._stages
        )
        self._plan = Plan(
            session=uuid.uuid4().hex,
            driver=extend.worker().life,
            wiring=self._wiring,
            owners=owners,
            prefixes=tuple(f"{stage}." for stage in range(len(owners))),
            lives={worker: extend.life_of(worker) for worker in workers_of(owners)},
            settings=self._settings,
            loss=self._loss,
            shared=plan_sharing(self._stages, owners, self._tied),
            outputs_to_cpu=not self._stages[-1][0].is_device_map_set,
        )
        self._known: dict[Rows, dict[str, tuple[Action, ...]]] = {}
        parts = {worker: (self._plan, self._modules_of(worker)) for worker in self.workers}
        self.call_each(sessions.join, parts)
        self._steps = Steps(self._plan, Outbox(self._plan, extend.worker(), Sessions.here().seek))
        make_equal(self._plan, self._stages)

    def _modules(self) -> Iterator[RemoteModule]:
        return (replica for replicas in self._stages for replica in replicas)

    def _modules_of(self, worker: str) -> dict[int, tuple[rpc.RRef[Any], str]]:
        return {
            index: (replica.get_module_rref(), replica.device)
            for index, replicas in enumerate(self._stages)
            for replica, owner in zip(replicas, self._plan.owners[index], strict=True)
            if owner == worker
        }

    def _rows(self, trains: bool, microbatches: int) -> dict[str, tuple[Action, ...]]:
        """Each worker's row of the table for so many micro-batches, which the workers have."""
        key = Rows(trains, microbatches)
        if key not in self._known:
            rows = self._make_rows(trains, microbatches)
            self.call_each(sessions.install, {worker: (key, row) for worker, row in rows.items()})
            self._known[key] = rows
        return self._known[key]

    def _make_rows(self, trains: bool, microbatches: int) -> dict[str, tuple[Action, ...]]:
        if not trains:
            table = choose_table(forward_only, self._plan.owners, microbatches)
        elif isinstance(self._schedule, Table):
            table = self._schedule
            if table.microbatches != microbatches:
                raise ScheduleError(
                    f"the table is for {table.microbatches} micro-batches, not {microbatches}"
                )
        else:
            table = choose_table(self._schedule, self._plan.owners, microbatches)
        validate(table, self._wiring)
        rows = fit(table, self._plan.owners, self._wiring)
        validate(Table.of(rows.values()), self._wiring)
        return rows

    def _begin(
        self,
        trains: bool,
        given: Sequence[Any],
        weights: tuple[float, ...] = (),
        scale: float = 1.0,
    ) -> Step:
        rows = self._rows(trains, len(given))
        order = StepOrder(self._step, Rows(trains, len(given)), self._trained, weights, scale)
        self._step += 1
        return self._steps.begin(order, rows, given)

    def _outputs(self, step: Step, later: Iterable[Step] = ()) -> list[Any]:
        reports = self._steps.finish(step, later).values()
        found = {at: output for each in reports for at, output in each.outputs.items()}
        return [found[at] for at in range(len(found))]

    def _require_keywords(self, keywords: Mapping[str, Any]) -> None:
        wanted = {
            name for stage in range(self._wiring.stages) for name in self._wiring.keywords(stage)
        } - {""}
        if wanted != set(keywords):
            raise ValueError(
                f"the stages take the keyword arguments {sorted(wanted)}, but the step got "
                f"{sorted(keywords)}; inputs= says which stage takes which"
            )


def _no_options(name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {}


def _as_replicas(stages: Stages) -> list[list[RemoteModule]]:
    replicas: list[list[Any]] = [
        list(each) if isinstance(each, (list, tuple)) else [each] for each in stages
    ]
    if not replicas or not all(replicas):
        raise ValueError(f"stages={stages!r}: a pipeline needs a stage, and each stage a module")
    for each in (module for modules in replicas for module in modules):
        if not isinstance(each, RemoteModule):
            raise TypeError(f"a stage is a RemoteModule, but got a {type(each).__name__}: {each!r}")
    return replicas


def _as_schedule(schedule: str | Path | Table | Schedule) -> Table | Schedule:
    if isinstance(schedule, Path) or (isinstance(schedule, str) and schedule.endswith(".csv")):
        return Table.read(schedule)
    if isinstance(schedule, str):
        if schedule not in SCHEDULES:
            raise ValueError(
                f"schedule={schedule!r} is none of {', '.join(map(repr, SCHEDULES))}, and no "
                "path of a .csv file"
            )
        return SCHEDULES[schedule]
    if not isinstance(schedule, Table) and not callable(schedule):
        raise TypeError(f"schedule={schedule!r} is a {type(schedule).__name__}, not a schedule")
    return schedule


def _require_positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")
    return value
