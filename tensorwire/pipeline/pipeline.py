"""``Pipeline``: stages of a model on several workers, trained together.

Owns what users call. Operations over the workers are the business of ``driver``, who takes part
with which table that of ``formation``, how steps run that of ``steps`` here and of ``worker``
there, and what is done when workers are lost that of ``backups``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from remote_module import RemoteModule
from tensorwire.checkpoint.spread import Share
from tensorwire.pipeline.actions import Table
from tensorwire.pipeline.arrival import copied
from tensorwire.pipeline.backups.coordinator import Kind, Operation
from tensorwire.pipeline.backups.placing import (
    require_backups,
)
from tensorwire.pipeline.balance import Balance
from tensorwire.pipeline.batches import Loop, require_loop
from tensorwire.pipeline.driver import Driver
from tensorwire.pipeline.formation import Design, Stages, as_replicas, as_schedule
from tensorwire.pipeline.microbatches import merge, require_no_gradients, split
from tensorwire.pipeline.optimizer import PipelineOptimizer
from tensorwire.pipeline.parameters import gathered, replaced
from tensorwire.pipeline.passes import Passes
from tensorwire.pipeline.plan import Loss
from tensorwire.pipeline.progress import progress
from tensorwire.pipeline.reduction import BatchLoss, Reduction
from tensorwire.pipeline.remote_optimizer import GroupRule
from tensorwire.pipeline.requirements import KEEP_FOR, require_passes, require_times
from tensorwire.pipeline.schedules import Schedule
from tensorwire.pipeline.shares import ModelShare
from tensorwire.pipeline.sharing import Tie
from tensorwire.pipeline.splitting import split_model
from tensorwire.pipeline.stage import settings_of
from tensorwire.pipeline.trace import Trace
from tensorwire.pipeline.wiring import SourceName, Wiring

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
        backups: of each stage, in another worker's memory: 0, or 1 so that training goes on, bit
            for bit the same, when a worker is lost. Then ``seed`` defaults to
            ``torch.initial_seed()``.
        spares: names of workers without stages that may back stages up, and take those of lost
            workers.
        name: under which a driver that died and came back finds the pipeline again; needs
            ``backups=1``.
        keep_for: seconds for which workers keep the copies when the driver of a pipeline with a
            name is gone.
        wait_for_return: seconds to wait for a lost worker to come back under its name, before its
            stages go to another. They go back to it when it is there.

    Attributes:
        driver: runs operations on the workers; for the parts of a pipeline.

    Raises:
        PipelineError: another living driver has a pipeline of this name.
        ScheduleError: the schedule does not fit the stages, or its table cannot work.
        TypeError: an argument is of another type.
        ValueError: an argument names what is not there, or cannot be, or would have no effect.

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
        inputs: Mapping[int, Sequence[SourceName]] | None = None,
        tied: Sequence[Tie] = (),
        recompute: bool | Collection[int] = False,
        autocast: torch.dtype | None = None,
        seed: int | None = None,
        prefixes: Sequence[str] | None = None,
        backups: int = 0,
        spares: Sequence[str] = (),
        name: str | None = None,
        keep_for: float = KEEP_FOR,
        wait_for_return: float = 0.0,
    ) -> None:
        replicas = as_replicas(stages)
        require_backups(replicas, backups, spares, name)
        require_passes(len(replicas), recompute, autocast, seed, prefixes)
        require_times(backups, name, keep_for, wait_for_return)
        if backups and seed is None:
            seed = torch.initial_seed()
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
            settings_of(len(replicas), recompute, autocast, seed),
            tuple(prefixes or (f"{each}." for each in range(len(replicas)))),
        )
        self.driver = Driver(self._design, name, backups, spares, keep_for, wait_for_return)
        self._passes = Passes(self.driver.carrier, self._design)
        self.driver.begin()
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
        return list(self.driver.formation.workers)

    @property
    def session(self) -> str:
        """Names this pipeline among all, in this life of its workers."""
        return self.driver.formation.plan.session

    @property
    def steps(self) -> int:
        """The number of training steps done; with ``seed``, random numbers depend on it."""
        return self.driver.coordinator.trained

    @property
    def optimizers(self) -> dict[str, PipelineOptimizer]:
        """The optimizers of this pipeline that are in use, by their keys."""
        return self.driver.optimizers

    @property
    def most_held(self) -> dict[int, int]:
        """The most micro-batches whose activations each stage held at once in the last step."""
        return dict(sorted(self._passes.most_held.items()))

    def table(self, microbatches: int | None = None) -> Table:
        """The actions of each worker, in order, in a step of so many micro-batches.

        Raises:
            ScheduleError: the schedule cannot serve as many.
        """
        count = microbatches or self._microbatches
        rows = self.driver.perform(Kind.ASK, lambda _: self.driver.formation.rows(True, count))
        return Table.of(rows.values())

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
            ValueError: the batch cannot be split, an argument is missing or too many, or requires
                a gradient, which a pipeline does not compute.
        """
        if self._loss is None:
            raise ValueError("loss=None: a pipeline trains only with a loss")
        self._passes.require_keywords(keywords)
        require_no_gradients(positional, {**keywords, "target": target})
        given = split(positional, keywords, target, self._microbatches)
        self.driver.go_home()
        return self._passes.train(given, self._loss, scale, self.driver.kept())

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
        self._passes.require_keywords(keywords)
        outputs = self._passes.evaluate(split(positional, keywords, None, self._microbatches))
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
        yield from self._passes.stream(batches, most)

    def trace(self) -> Trace | None:
        """The times of each worker's actions in the last step; None if there was none.

        Example::

            pipe.train_step(x, target=y)
            trace = pipe.trace()
            print(trace)                       # its length, and how idle the workers were
            trace.save_png("step.png")         # who did what when
            trace.save_chrome("step.json")     # for https://ui.perfetto.dev
        """
        return self._passes.trace()

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

    def batches(
        self,
        loader: Iterable[Any],
        *,
        state: Mapping[str, Any] | None = None,
        folder: str | Path | None = None,
        every: int | None = None,
        keep: int | None = None,
        bar: bool = False,
    ) -> Iterator[Any]:
        """Yields a loader's batches, and knows the place in them.

        With ``folder``, a checkpoint is saved every so many batches, and a pipeline that has not
        trained yet goes on from the latest one there. In a pipeline with a ``name``, a driver that
        comes back goes on at the batch where it was. A loader with ``state_dict`` and
        ``load_state_dict`` has its state kept; of others, the batches that are done are passed
        over, after torch's default generator was set as it was when the loop began.

        Args:
            loader: yields batches. Pairs get the names ``x`` and ``y``.
            state: what has its state in this process and goes with the place, by name, such as
                schedulers. The pipeline's optimizers and scalers are kept anyway.
            folder: of checkpoints.
            every: how many batches lie between two of them.
            keep: how many of them stay. None: all.
            bar: show a bar, as :meth:`progress` does.

        Raises:
            ImportError: tqdm is not installed.
            TypeError: an object in ``state`` has no state.
            ValueError: arguments do not go together, or where the place is kept, in checkpoints or
                under a name, a scheduler is not in ``state``.

        Example::

            for batch in pipe.batches(loader, state={"scheduler": scheduler}):
                pipe.train_step(batch.x, target=batch.y)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        """
        require_loop(state or {}, folder, every, keep)
        number = self.driver.places.next_loop()
        loop = Loop(self, number, loader, state or {}, folder, every, keep)
        if not bar:
            return loop.run()
        total = len(loader) if isinstance(loader, Sized) else None
        return progress(self, loop.run(), total=total)

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
        self.driver.recover(timeout)

    def replace(self, stage: int, module: RemoteModule, replica: int = 0) -> None:
        """Puts another module in the place of a stage, on the same worker or elsewhere.

        As after :meth:`recover`, optimizers have forgotten what they kept.
        """
        self._design.stages[stage][replica] = module
        self.driver.form_again()

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
        self.driver.add(made)
        return made

    def move(self, stage: int, worker: str, replica: int = 0) -> None:
        """Puts a stage on another worker, state and all, between two steps.

        Nothing that is computed changes by a bit. The schedule's table stays the one of the
        workers that the pipeline was made with.

        Args:
            stage: its number.
            worker: the name of one that is in the group, with or without stages.
            replica: of the stage.

        Raises:
            StageFailedError: a worker was lost meanwhile, and there is no copy of its stage.
            ValueError: there is no such stage, replica or worker, the worker has another replica
                of the stage, or the stage's handle does not know how its module was made.

        Example::

            pipe.move(2, "worker:5")
        """
        self.driver.move(stage, worker, replica)

    def rebalance(self, workers: Sequence[str] | None = None) -> list[str]:
        """Deals stages out to workers anew, such that the slowest worker is as fast as can be.

        Each worker gets stages that follow each other, by the times measured in the last step.
        Stages with replicas stay.

        Args:
            workers: their names, in order. Default those that have stages, or will have some when
                they have come back, and are living; stages go back to the others when they return.

        Returns:
            The worker of each stage; of replicas, that of the first.

        Raises:
            StageFailedError: a worker was lost meanwhile, and there is no copy of its stage.
            ValueError: no such worker is in the group.
        """
        return self.driver.rebalance(self._passes.seconds(), workers)

    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Clips gradients like ``torch.nn.utils.clip_grad_norm_``, over all stages' parameters.

        Args:
            max_norm: gradients are scaled such that their norm is no more than this.
            norm_type: which norm.
            error_if_nonfinite: raise an error if the norm is infinite or no number.

        Returns:
            The norm of all gradients together, before they were clipped.

        Raises:
            RuntimeError: the norm is infinite or no number, and ``error_if_nonfinite`` is set.
        """
        return self.driver.clip(max_norm, norm_type, error_if_nonfinite)

    def state_dict(self) -> dict[str, Any]:
        """All parameters and buffers by their names in the pipeline, gathered here.

        A stage's own names have its number before them: ``"1.norm.weight"``. To save a model
        without gathering it, use ``tensorwire.checkpoint``.
        """
        state: dict[str, Any] = self.driver.perform(Kind.ASK, lambda _: gathered(self._design))
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Takes over what :meth:`state_dict` returned, in all replicas.

        Raises:
            RuntimeError: names are missing or too many.
        """
        if self.backups:
            state_dict = copied(dict(state_dict))
        self.driver.perform(Kind.STEP, lambda _: replaced(self._design, state_dict))

    def checkpoint_shares(self) -> list[Share]:
        """The shares of the model each worker saves and loads; see ``tensorwire.checkpoint``."""
        return [
            Share(worker, ModelShare(self.driver.formation.plan.session)) for worker in self.workers
        ]

    def checkpoint_common(self) -> dict[str, int]:
        """The state that no worker has: the number of steps."""
        return {"steps": self.steps}

    def load_checkpoint_common(self, common: dict[str, int]) -> None:
        """Goes on counting steps from a checkpoint's number, on which random numbers depend."""
        self.driver.coordinator.trained = common["steps"]
        self.driver.note_loaded()

    def train(self, mode: bool = True) -> Self:
        """Puts all stages into training mode, or with ``mode=False`` into evaluation mode."""

        def put(operation: Operation) -> None:
            for module in self._design.modules():
                module.train(mode)

        self.driver.perform(Kind.CHANGE, put)
        return self

    def eval(self) -> Self:
        """Puts all stages into evaluation mode."""
        return self.train(False)

    @property
    def backups(self) -> int:
        """The number of copies of each stage in other workers' memory."""
        return self.driver.carrier.backups

    def close(self) -> None:
        """Has the workers forget the pipeline and its backups; the stages' modules stay."""
        self.driver.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _no_options(name: str, parameter: torch.nn.Parameter) -> dict[str, Any]:
    return {}


def _require_positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}={value!r} must be a positive integer")
    return value
