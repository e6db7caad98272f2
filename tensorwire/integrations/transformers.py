"""Moves the optimizer of a ``transformers.Trainer`` to parameter servers, by a callback.

The Trainer stays as it is: it makes its optimizer, loads a checkpoint into it, and steps it.
Before the first step the callback puts one in its place that steps at the servers. It has the
parameter groups that schedulers write to, and the state that checkpoints keep.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch import distributed as dist
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.utils import logging

from tensorwire import parameter_server as ps
from tensorwire.integrations._going_back import keep_training, save_servers, trainer_of
from tensorwire.integrations._phases import SlowPhases
from tensorwire.integrations._ranks import (
    FollowingOptimizer,
    LeadingOptimizer,
    hear,
    parameters_of,
    telling_others,
)
from tensorwire.integrations._shared_data import SharedData
from tensorwire.integrations._tables import (
    leave_rows_out,
    require_fitting,
    require_rows_of,
    say_what_best_is,
)

__all__ = ["Mode", "ParameterServerCallback", "stand_alone"]

_OF_A_PROCESS_GROUP: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Mode(enum.Enum):
    """The ways in which a Trainer and the servers work together."""

    SYNC = "sync"
    """The servers begin with what the Trainer has. Every step waits for its result; of one
    Trainer all bits are those of a local run."""
    ASYNC = "async"
    """Several Trainers, each with data of its own, share what the servers have; the first one's
    values are where all begin."""
    BACKWARD = "backward"
    """Like ``SYNC``, but each gradient is pushed as soon as it is there, and freed. There is never
    more than one parameter's gradient; so gradients cannot be clipped or accumulated.
    """


class ParameterServerCallback(TrainerCallback):
    """Has a ``Trainer`` keep its parameters and the optimizer's state at parameter servers.

    Everything else stays as it is: schedulers, clipping, accumulation, mixed precision,
    evaluation, checkpoints. A checkpoint can be resumed with or without servers. ``rpc.init_rpc``
    must have been called before training begins.

    Several processes train together as Trainers of their own (:func:`stand_alone`), or under
    DistributedDataParallel; there only rank 0 speaks to the servers.

    Whoever watches the job (``rpcrun --dashboard``, standstills) sees evaluations and saves as slow
    phases, which raise no alarm.

    With each checkpoint the servers write a snapshot into its folder. If servers are lost of
    which there is no backup, ``train`` goes on by itself from the checkpoint to which they went
    back. For this the callback must have been given to the Trainer when it was made.

    Args:
        servers: names of the workers that run ``ps.serve``, or a connected cluster.
        mode: how Trainer and servers work together: a :class:`Mode` or its value.
        staleness: in ``ASYNC`` mode, how many steps a Trainer may be ahead of the slowest.
            Default without bound.
        trainers: how many Trainers wait for each other to begin. Default one.
        backups: servers that have a copy of each share.
        name: of the parameters in the cluster. Several models of one process need different ones.
        snapshots: name of the folder, in that of each checkpoint, for the servers' snapshot; all
            must see it under the same path. None for no snapshots.
        every_sample_once: in ``ASYNC`` mode, all Trainers have the same data set and share it by
            ``Cluster.samples``: each sample is trained once in each epoch, whoever dies, joins or
            resumes. Default no: each trains all that it has. The callback must have been given to
            the Trainer when it was made.

    Raises:
        ValueError: there is no such mode, or ``staleness`` or ``every_sample_once`` is for another.

    Example::

        trainer = Trainer(model, args, train_dataset=data,
                          callbacks=[ParameterServerCallback(servers=["ps:0", "ps:1"])])
        trainer.train()
    """

    def __init__(
        self,
        servers: Sequence[str] | ps.Cluster,
        *,
        mode: Mode | str = Mode.SYNC,
        staleness: int | None = None,
        trainers: int = 1,
        backups: int = 0,
        name: str = "model",
        snapshots: str | None = "parameter_server",
        every_sample_once: bool = False,
    ) -> None:
        self.mode = _mode(mode)
        if staleness is not None and self.mode is not Mode.ASYNC:
            raise ValueError(f"staleness={staleness} is for mode='async', not {self.mode.value!r}")
        if every_sample_once and self.mode is not Mode.ASYNC:
            raise ValueError(
                f"every_sample_once={every_sample_once} is for mode='async', not "
                f"{self.mode.value!r}"
            )
        self.optimizer: ps.Optimizer | None = None
        self._servers = servers
        self._staleness = staleness
        self._trainers = trainers
        self._backups = backups
        self._name = name
        self._snapshots = snapshots
        self._phases = SlowPhases()
        self._every_sample_once = every_sample_once
        self._shared: SharedData | None = None
        self._resumed: str | None = None

    @property
    def cluster(self) -> ps.Cluster | None:
        """The cluster; None before training."""
        return None if self.optimizer is None else self.optimizer.cluster

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Has the Trainer go on when servers went back, and know its number among several.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        trainer = trainer_of(state)
        if trainer is not None:
            keep_training(trainer, self._resumes, self._begin_again)
            leave_rows_out(trainer)
            if self._every_sample_once:
                self._shared = SharedData(trainer, self._name)
        if _is_alone_among_others(args):
            _take_number(args)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        optimizer: Any = None,
        **others: Any,
    ) -> None:
        """Puts the servers' optimizer in the place of the Trainer's.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            optimizer: the Trainer's, which may have been loaded from a checkpoint.
            others: what else the Trainer tells.

        Raises:
            TypeError: the Trainer's optimizer is none of torch's, such as DeepSpeed's.
            ValueError: an argument of the Trainer does not go with the mode, or with tables.
        """
        self._phases.ended()  # of a run before, if an error ended it
        _require_fitting(args, self.mode)
        if self._every_sample_once and self._shared is None:
            raise ValueError(
                "every_sample_once=True: give the callback to the Trainer when it is made, "
                "Trainer(..., callbacks=[...]), as its data loader is another"
            )
        holder, inner = _open(optimizer)
        model = others.get("model")
        require_fitting(args, inner, model)
        if isinstance(inner, ps.Optimizer):  # a second ``train``, or the Trainer made it itself
            self.optimizer = inner
            inner.cluster.join()
        elif args.world_size > 1:
            self._move_as_one_of_several(holder, inner)
        else:
            self.optimizer = self._move(inner, ps.Optimizer, model)
            _put(holder, self.optimizer)
        if self.cluster is not None:
            require_rows_of(self._resumed, state.global_step, self.cluster, model)
        if self._shared is not None and self.cluster is not None:
            self._shared.begin(self.cluster, state, self._resumed)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Sets the servers to what the model has, such as the best checkpoint.

        Trainers that wait for each other do not wait for this one any more, unless it was given a
        connected cluster, whose owner says when it has finished.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        self._phases.ended()
        if self.optimizer is None:
            return
        if self._shared is not None:
            self._shared.ended()
        if self.mode is not Mode.ASYNC or args.load_best_model_at_end:
            self.optimizer.upload()
        if args.load_best_model_at_end:
            best = state.best_model_checkpoint
            say_what_best_is(others.get("model"), best, self._snapshots)
        if not isinstance(self._servers, ps.Cluster) and self._is_awaited:
            self.optimizer.cluster.finish()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Leaves saving to the first of several Trainers; names the slow phase that follows.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        if self._shared is not None:
            self._shared.step_ended(state)
        self._leave_saving(args, control)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Has a Trainer that shares its data end with the last sample, not after some steps.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        if self._shared is not None:
            self._shared.before_step(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Does the same as at the end of a step; ends training if all samples are trained.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        if self._shared is not None:
            self._shared.epoch_ended(args, state, control)
        self._leave_saving(args, control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Ends the slow phase before it; has the schedule be where all Trainers are.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        self._phases.ended()
        if self._shared is not None:
            self._shared.step_begins(others.get("lr_scheduler"))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Names an evaluation, which takes long, also one outside of training.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        self._phases.predicts()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Ends the slow phase of an evaluation.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        self._phases.evaluated(control.should_save)

    def on_predict(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any,
        **others: Any,
    ) -> None:
        """Ends the slow phase of a prediction.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            metrics: of the prediction.
            others: what else the Trainer tells.
        """
        self._phases.ended()

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: Any
    ) -> None:
        """Has the servers write a snapshot beside the checkpoint.

        Args:
            args: of the Trainer.
            state: of the Trainer.
            control: of the Trainer.
            others: what else the Trainer tells.
        """
        folder = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        if self._shared is not None and folder.is_dir():
            self._shared.save(folder)
        if self.cluster is not None and self._snapshots is not None and folder.is_dir():
            save_servers(self.cluster, folder / self._snapshots)
        self._phases.ended()

    def _leave_saving(self, args: TrainingArguments, control: TrainerControl) -> None:
        """Leaves saving to the first of several Trainers; names the slow phase that follows."""
        control.should_save = control.should_save and (args.should_save or args.world_size > 1)
        self._phases.step_ended(control.should_evaluate, control.should_save)

    def _resumes(self, checkpoint: str | None) -> None:
        self._resumed = checkpoint

    def _begin_again(self, trainer: Trainer) -> None:
        """Has an asynchronous Trainer begin with what the servers have, not with what it saved."""
        holder, inner = _open(trainer.optimizer)
        if self.mode is Mode.ASYNC and isinstance(inner, ps.Optimizer) and inner.local is not None:
            _put(holder, inner.local)

    @property
    def _is_awaited(self) -> bool:
        """True if others wait for this Trainer, or may wait for samples that it has taken."""
        has_samples = self._shared is not None and not self._shared.is_done
        return self._trainers > 1 or self._staleness is not None or has_samples

    def _move_as_one_of_several(
        self, holder: AcceleratedOptimizer, inner: torch.optim.Optimizer
    ) -> None:
        """Moves the optimizer under DistributedDataParallel: only rank 0 talks to the servers."""
        if dist.get_rank():
            if not isinstance(inner, FollowingOptimizer):
                inner = FollowingOptimizer(inner)
                _put(holder, inner)
            hear(parameters_of(inner))
            return
        with telling_others(parameters_of(inner)):
            self.optimizer = self._move(inner, LeadingOptimizer)
        _put(holder, self.optimizer)

    def _move(
        self, local: torch.optim.Optimizer, kind: type[ps.Optimizer], model: nn.Module | None = None
    ) -> ps.Optimizer:
        cluster = self._connect()
        values = [each.detach().clone() for each in parameters_of(local)]
        state = local.state_dict()
        pushing = ps.Pushing.BACKWARD if self.mode is Mode.BACKWARD else ps.Pushing.STEP
        cluster.release(self._name)  # by the model of a Trainer before, which may be there still
        moved = kind.wrap(local, cluster, model, name=self._name, pushing=pushing)
        # A scheduler that was made for the local one looks there whether there was a step.
        local._opt_called = True  # type: ignore[attr-defined]
        if self.mode is not Mode.ASYNC:  # what servers kept from earlier does not count
            _copy(parameters_of(local), values)
            moved.load_state_dict(state)
        return moved

    def _connect(self) -> ps.Cluster:
        if isinstance(self._servers, ps.Cluster):
            return self._servers
        consistency: Any = ps.BSP()
        if self.mode is Mode.ASYNC:
            consistency = ps.Async() if self._staleness is None else ps.SSP(self._staleness)
        return ps.connect(
            list(self._servers),
            backups=self._backups,
            consistency=consistency,
            trainers=self._trainers,
            restore=self._snapshot_of_checkpoint(),
        )

    def _snapshot_of_checkpoint(self) -> Path | None:
        """The servers' snapshot with which new servers begin, so that their account is as old as
        the checkpoint; servers that are there already go on with theirs.
        """
        if not self._every_sample_once or self._resumed is None or self._snapshots is None:
            return None
        folder = Path(self._resumed) / self._snapshots
        return folder if folder.is_dir() else None


def stand_alone() -> None:
    """Has accelerate take this process for a Trainer of its own, not for one of a process group.

    A launcher such as rpcrun says in the environment how many workers there are, servers among
    them, and accelerate would wait for all of them to form a process group. To be called before
    ``TrainingArguments`` are made. A Trainer with a :class:`ParameterServerCallback` still knows
    its number among those of its role: only the first one saves, and has the log level of the
    main process.

    Example::

        rpc.init_rpc()
        stand_alone()
        args = TrainingArguments("output")
    """
    os.environ.setdefault("ROLE_RANK", os.environ.get("RANK", "0"))
    for name in _OF_A_PROCESS_GROUP:
        os.environ.pop(name, None)


def _is_alone_among_others(args: TrainingArguments) -> bool:
    """True for one of several Trainers of a role that form no process group."""
    return args.world_size == 1 and not any(name in os.environ for name in _OF_A_PROCESS_GROUP)


def _take_number(args: TrainingArguments) -> None:
    """Has the Trainer know its number in its role: who saves and logs goes by it."""
    number, known = int(os.environ.get("ROLE_RANK", "0")), args.distributed_state
    if number and known is not None:
        known.process_index = known.local_process_index = number
        logging.set_verbosity(args.get_process_log_level())


def _mode(mode: Mode | str) -> Mode:
    try:
        return Mode(mode)
    except ValueError:
        known = ", ".join(repr(each.value) for each in Mode)
        raise ValueError(f"mode={mode!r} is none of {known}") from None


def _require_fitting(args: TrainingArguments, mode: Mode) -> None:
    if mode is not Mode.BACKWARD:
        return
    if args.world_size > 1:
        raise ValueError(
            f"world_size={args.world_size}: in mode 'backward' a gradient leaves before "
            "DistributedDataParallel has its mean; give another mode, or call stand_alone() and "
            "start each process as a Trainer of its own, with trainers=N"
        )
    if args.max_grad_norm:
        raise ValueError(
            f"max_grad_norm={args.max_grad_norm}: in mode 'backward' a gradient is gone before the "
            "norm of all is known; give max_grad_norm=0"
        )
    if args.gradient_accumulation_steps != 1:
        raise ValueError(
            f"gradient_accumulation_steps={args.gradient_accumulation_steps}: in mode 'backward' "
            "each gradient is pushed at once; give gradient_accumulation_steps=1"
        )


def _open(optimizer: Any) -> tuple[AcceleratedOptimizer, torch.optim.Optimizer]:
    """The innermost of accelerate's wrappers, and what it steps."""
    holder, inner = None, optimizer
    while isinstance(inner, AcceleratedOptimizer):
        holder, inner = inner, inner.optimizer
    if holder is None or not isinstance(inner, torch.optim.Optimizer):
        raise TypeError(
            f"ParameterServerCallback takes the place of a torch optimizer that accelerate has "
            f"prepared, and the Trainer has a {type(optimizer).__name__}"
        )
    return holder, inner


def _put(holder: AcceleratedOptimizer, optimizer: torch.optim.Optimizer) -> None:
    """Makes accelerate step this optimizer; references to the holder stay valid."""
    scaler = holder.scaler
    AcceleratedOptimizer.__init__(holder, optimizer, device_placement=False, scaler=scaler)


@torch.no_grad()
def _copy(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
