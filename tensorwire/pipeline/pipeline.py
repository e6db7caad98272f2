"""``Pipeline``: stages of a model on several workers, trained together.

Owns the number of the next step, and what users call. Who takes part with which table is the
business of ``formation``, how steps run that of ``steps`` here and of ``worker`` there.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

import rpc
from optim_dist.clipping import total_norm
from remote_module import RemoteModule
from tensorwire.checkpoint.spread import Share
from tensorwire.pipeline import remote_optimizer, sessions
from tensorwire.pipeline.actions import Table
from tensorwire.pipeline.balance import Balance
from tensorwire.pipeline.clocks import offset
from tensorwire.pipeline.formation import Design, Formation, Stages, as_replicas, as_schedule
from tensorwire.pipeline.microbatches import merge, rows_of, split
from tensorwire.pipeline.optimizer import PipelineOptimizer
from tensorwire.pipeline.plan import Loss, Rows, Span, StepOrder
from tensorwire.pipeline.progress import progress
from tensorwire.pipeline.reduction import BatchLoss, Reduction
from tensorwire.pipeline.remote_optimizer import GroupRule
from tensorwire.pipeline.returning import wait_for_workers
from tensorwire.pipeline.schedules import Schedule
from tensorwire.pipeline.shares import ModelShare
from tensorwire.pipeline.sharing import Tie
from tensorwire.pipeline.splitting import split_model
from tensorwire.pipeline.stage import StageSettings
from tensorwire.pipeline.steps import Step
from tensorwire.pipeline.trace import Trace
from tensorwire.pipeline.wiring import Told, Wiring

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")


class Pipeline:
    """Stages of a model, each a ``RemoteModule``, trained on micro-batches that flow through.

    Args:
        stages: in order. A list in place of one module makes replicas of a stage, to which
            micro-batches are dealt out in turn.
        schedule: the name of a known one (``SCHEDULES``), a function like those, a table of
            your own or the path of a file with one.
        microbatches: how many a batch is split into.
        loss: of the last stage's output and the target of a micro-batch.
        reduction: how it reduces rows, ``"mean"`` or ``"sum"``; the batch's loss is the same of
            all rows. Default as a loss of ``torch.nn`` says, or else by their mean.
        inputs: the sources of a stage's arguments, where these are not just the outputs of
            the stage before: see :class:`Wiring`.
        tied: groups of parameters that stay equal, each named by its stage and its name
            there, as in ``[((0, "embedding.weight"), (2, "head.weight"))]``.
        recompute: stages that keep only their inputs and run forward passes again; True: all.
        autocast: the dtype of ``torch.autocast`` in forward passes.
        seed: of random numbers in forward passes, which then depend on it, the step, the stage
            and the micro-batch alone. Initial weights are drawn before: give each
            ``RemoteModule`` a ``seed``; those of ``split`` are the model's.
        prefixes: put before the names of each stage's parameters in states and checkpoints, where
            they must be unique; default the stage's number and a dot.

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
        reduction: Reduction | None = None,
        inputs: Mapping[int, Sequence[Told]] | None = None,
        tied: Sequence[Tie] = (),
        recompute: bool | Collection[int] = False,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        prefixes: Sequence[str] | None = None,
    ) -> None:
        replicas = as_replicas(stages)
        numbers = range(len(replicas))
        settings = [
            StageSettings(
                recompute if isinstance(recompute, bool) else each in recompute, autocast, seed
            )
            for each in numbers
        ]
        self._microbatches = _require_positive("microbatches", microbatches)
        if loss is None and reduction is not None:
            raise ValueError(f"reduction={reduction!r} needs loss=, whose reduction it is")
        self._loss = None if loss is None else BatchLoss(loss, reduction)
        self._design = Design(
            replicas,
            Wiring.chain(len(replicas), inputs),
            as_schedule(schedule),
            self._loss,
            tied,
            tuple(settings),
            tuple(prefixes or (f"{each}." for each in numbers)),
        )
        self._step = 0
        self._trained = 0
        self._optimizers: weakref.WeakSet[PipelineOptimizer] = weakref.WeakSet()
        self._most_held: dict[int, int] = {}
        self._formation = Formation(self._design)
        if loss is not None:
            self.table(microbatches)

    @classmethod
    def split(
        cls,
        model: torch.nn.Module,
        *,
        workers: Sequence[str],
        at: Sequence[str] | None = None,
        example: Any,
        balance: Balance = "time",
        **options: Any,
    ) -> Self:
        """Splits a model into stages and puts them on workers.

        An ``nn.Sequential`` is sliced. Other models are traced by ``torch.distributed.pipelining``;
        there each worker needs memory for the whole model while it traces. Weights that several
        stages have are tied, and names of parameters stay those in the whole model.

        Args:
            model: the whole; it stays as it is.
            workers: where each stage goes, such as ``["stage0", "stage1/cuda:0"]``.
            at: the names of the modules with which stages begin, but the first. None: an
                ``nn.Sequential`` is measured and cut evenly.
            example: an argument of the model, or a tuple of several, of a micro-batch's shape.
            balance: what is even then, "time" or "memory".
            options: of :class:`Pipeline`.

        Raises:
            ValueError: there are more or fewer stages than workers, a name is not there, or the
                model cannot be cut evenly.

        Example::

            pipe = Pipeline.split(
                model, at=["blocks.4", "blocks.8"], workers=["a", "b", "c"],
                example=torch.zeros(2, 128, dtype=torch.long), schedule="1f1b", loss=loss)
        """
        made = split_model(model, workers, at, example, balance)
        names = {"inputs": made.inputs, "tied": made.tied, "prefixes": [""] * len(made.stages)}
        return cls(made.stages, **{**names, **options})

    @property
    def stages(self) -> list[RemoteModule]:
        """The stages' modules; of replicas, the first."""
        return [replicas[0] for replicas in self._design.stages]

    @property
    def replicas(self) -> list[list[RemoteModule]]:
        """The modules of each stage, all replicas."""
        return [list(replicas) for replicas in self._design.stages]

    @property
    def workers(self) -> list[str]:
        """The names of the workers, in the order of their stages."""
        return list(self._formation.workers)

    @property
    def session(self) -> str:
        """Names this pipeline among all, in this life of its workers."""
        return self._formation.plan.session

    @property
    def steps(self) -> int:
        """The number of training steps done; with ``seed``, random numbers depend on it."""
        return self._trained

    @property
    def most_held(self) -> dict[int, int]:
        """The most micro-batches whose activations each stage held at once in the last step."""
        return dict(sorted(self._most_held.items()))

    def table(self, microbatches: int | None = None) -> Table:
        """The actions of each worker, in order, in a step of so many micro-batches.

        Raises:
            ScheduleError: the schedule cannot serve as many.
        """
        return Table.of(self._formation.rows(True, microbatches or self._microbatches).values())

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
            The loss of the batch: the mean over its rows, or with ``reduction="sum"`` their sum.

        Raises:
            StageFailedError: a stage raised an error, or its worker was lost.
            ValueError: the batch cannot be split, or an argument is missing or too many.
        """
        if self._loss is None:
            raise ValueError("loss=None: a pipeline trains only with a loss")
        self._require_keywords(keywords)
        given = split(positional, keywords, target, self._microbatches)
        weights = self._loss.weights([rows_of(each) for each in given])
        step = self._begin(True, given, weights, scale)
        reports = self._formation.steps.finish(step)
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
                self._formation.steps.abort(list(under_way), "nobody wants the rest of the stream")
            raise

    def trace(self) -> Trace | None:
        """The times of each worker's actions in the last step; None if there was none.

        Example::

            pipe.train_step(x, target=y)
            trace = pipe.trace()
            print(trace)                       # its length, and how idle the workers were
            trace.save_png("step.png")         # who did what when
            trace.save_chrome("step.json")     # for https://ui.perfetto.dev
        """
        found: dict[str, list[Span]] = self._formation.call_all(sessions.spans)
        if not any(found.values()):
            return None
        shifted = {}
        for worker, spans in found.items():
            ahead = offset(partial(rpc.rpc_sync, worker, sessions.read_clock))
            shifted[worker] = [span.shifted(-ahead) for span in spans]
        return Trace(shifted, self._design.wiring)

    def progress(
        self,
        batches: Iterable[T],
        count: Callable[[T], int] | None = None,
        unit: str = "tokens",
        **options: Any,
    ) -> Iterator[T]:
        """Yields batches and shows a bar with the rate, the bubble and every stage's memory.

        Args:
            batches: for the loop.
            count: how many units a batch has; default the elements of its first tensor.
            unit: their name.
            options: for ``tqdm.tqdm``.

        Raises:
            ImportError: tqdm is not installed.

        Example::

            for x, y in pipe.progress(loader):
                pipe.train_step(x, target=y)
        """
        return progress(self, batches, count, unit, **options)

    def recover(self, timeout: float = 60.0) -> None:
        """Waits until lost workers are back, makes their stages anew and forms the pipeline again.

        Afterwards those stages are as at the beginning, and optimizers have forgotten what they
        kept: load a checkpoint.

        Args:
            timeout: in seconds, for all of them to be back.

        Raises:
            TimeoutError: a worker was not back in time.
            ValueError: a stage's handle does not know how its module was made; see
                :meth:`replace`.

        Example::

            try:
                loss = pipe.train_step(x, target=y)
            except StageFailedError:
                pipe.recover()
                checkpoint.load(checkpoint.latest("checkpoints"), state)
        """
        lost = self._formation.lost()
        wait_for_workers(lost, timeout)
        for index, replicas in enumerate(self._design.stages):
            for replica, owner in zip(replicas, self._formation.plan.owners[index], strict=True):
                if owner in lost:
                    replica.recreate()
        self._form_again()

    def replace(self, stage: int, module: RemoteModule, replica: int = 0) -> None:
        """Puts another module in the place of a stage, on the same worker or elsewhere.

        As after :meth:`recover`, optimizers have forgotten what they kept.
        """
        self._design.stages[stage][replica] = module
        self._form_again()

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
        found = self._formation.call_all(remote_optimizer.gradient_norms, norm_type).values()
        norms = [
            norm
            for stage in range(len(self._design.stages))
            for each in found
            for norm in each.get(stage, ())
        ]
        total = total_norm(norms, norm_type, error_if_nonfinite)
        factor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        self._formation.call_all(remote_optimizer.scale_gradients, float(factor))
        return total

    def state_dict(self) -> dict[str, Any]:
        """All parameters and buffers by their names in the pipeline, gathered here.

        A stage's own names have its number before them: ``"1.norm.weight"``. To save a model
        without gathering it, use ``tensorwire.checkpoint``.
        """
        state: dict[str, Any] = {}
        for stage, prefix in zip(self.stages, self._design.prefixes, strict=True):
            state.update({prefix + name: each for name, each in stage.state_dict().items()})
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned, in all replicas.

        Raises:
            RuntimeError: names are missing or too many.
        """
        known: set[str] = set()
        for replicas, prefix in zip(self._design.stages, self._design.prefixes, strict=True):
            for replica in replicas:
                rref = replica.get_module_rref()
                names = rpc.rpc_sync(rref.owner(), sessions.state_names, (rref,))
                own = {n: state_dict[prefix + n] for n in names if prefix + n in state_dict}
                replica.load_state_dict(own)
                known.update(prefix + name for name in names)
        if rest := sorted(set(state_dict) - known):
            raise RuntimeError(f"no stage has what the state has: {rest}")

    def checkpoint_shares(self) -> list[Share]:
        """The shares of the model each worker saves and loads; see ``tensorwire.checkpoint``."""
        return [Share(worker, ModelShare(self._formation.plan.session)) for worker in self.workers]

    def checkpoint_common(self) -> dict[str, int]:
        """The state that no worker has: the number of steps."""
        return {"steps": self._trained}

    def load_checkpoint_common(self, common: dict[str, int]) -> None:
        """Goes on counting steps from a checkpoint's number, on which random numbers depend."""
        self._trained = common["steps"]

    def train(self, mode: bool = True) -> Self:
        """Puts all stages into training mode, or with ``mode=False`` into evaluation mode."""
        for module in self._design.modules():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Puts all stages into evaluation mode."""
        return self.train(False)

    def call_all(self, function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
        """Calls ``function(session, *arguments)`` on every worker; returns what each returns."""
        return self._formation.call_all(function, *arguments)

    def call_each(
        self, function: Callable[..., Any], arguments: Mapping[str, tuple[Any, ...]]
    ) -> dict[str, Any]:
        """Calls ``function(session, *arguments[worker])`` on these workers, at the same time."""
        return self._formation.call_each(function, arguments)

    def close(self) -> None:
        """Has the workers forget the pipeline; the stages' modules stay."""
        self._formation.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _form_again(self) -> None:
        """Begins a session with the workers that are there now, and optimizers made anew."""
        self._formation.leave()
        self._formation = Formation(self._design)
        self._step = 0
        for optimizer in self._optimizers:
            optimizer.renew()

    def _begin(
        self,
        trains: bool,
        given: Sequence[Any],
        weights: tuple[float, ...] = (),
        scale: float = 1.0,
    ) -> Step:
        rows = self._formation.rows(trains, len(given))
        order = StepOrder(self._step, Rows(trains, len(given)), self._trained, weights, scale)
        self._step += 1
        return self._formation.steps.begin(order, rows, given)

    def _outputs(self, step: Step, later: Iterable[Step] = ()) -> list[Any]:
        reports = self._formation.steps.finish(step, later).values()
        found = {at: output for each in reports for at, output in each.outputs.items()}
        return [found[at] for at in range(len(found))]

    def _require_keywords(self, keywords: Mapping[str, Any]) -> None:
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


def _no_options(name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {}


def _require_positive(name: str, value: int) -> int:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")
    return value
