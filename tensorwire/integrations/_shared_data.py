"""Has several Trainers share one data set, each sample of which counts once in each epoch.

A Trainer makes its data loader and counts steps and epochs for itself. Here its loader is put
aside, and one with ``Cluster.samples`` takes its place, of which a batch has all samples of an
optimizer's step. It says of itself that it is as long as the epoch of all Trainers, so the Trainer
makes a schedule for that; a step's place among all steps then says where in the schedule it is.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder
from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import IntervalStrategy, SaveStrategy

from tensorwire import parameter_server as ps

_logger: Final = logging.getLogger("tensorwire")
_ACCOUNT: Final = "cluster_samples.json"
_OF_A_LOADER: Final = (
    "num_workers",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
"""Arguments of a loader that the one in its place has, too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The training of all Trainers together, as the arguments of one say.

    Args:
        length: samples in an epoch.
        per_step: samples that a Trainer has for each step of its optimizer.
        parts: batches into which they are divided, whose gradients are accumulated.
        shuffle: whether each epoch has an order of its own.
        seed: of these orders.
        epochs: how many.
        drop_last: whether the last step of an epoch is left out if it has fewer samples.
    """

    length: int
    per_step: int
    parts: int
    shuffle: bool
    seed: int
    epochs: int
    drop_last: bool

    @property
    def in_epoch(self) -> int:
        """Steps of all Trainers in an epoch."""
        steps, rest = divmod(self.length, self.per_step)
        return steps + (rest > 0 and not self.drop_last)

    @property
    def steps(self) -> int:
        """Steps of all Trainers."""
        return self.epochs * self.in_epoch

    def begin(self, cluster: ps.Cluster, name: str) -> ps.Samples:
        """The sampler that all Trainers name alike."""
        return cluster.samples(
            self.length,
            batch_size=self.per_step,
            shuffle=self.shuffle,
            seed=self.seed,
            epochs=self.epochs,
            drop_last=self.drop_last,
            name=name,
        )


class SharedLoader:
    """The batches of one Trainer, in the place of its own loader.

    An iteration ends where an epoch does, as far as this Trainer's batches show that; the next one
    goes on from there. So there are as many iterations as epochs, or fewer.

    Args:
        own: the Trainer's loader.
        plan: of all Trainers.

    Attributes:
        dataset: the Trainer's.
        batch_size: samples in a batch.
        position: of the step whose batches were yielded last.
        is_done: all samples of all epochs are trained.
    """

    def __init__(self, own: Any, plan: Plan) -> None:
        self.dataset = own.dataset
        self.batch_size = plan.per_step // plan.parts
        self.position: ps.Position | None = None
        self.is_done = False
        self._own = own
        self._plan = plan
        self._data: ps.Samples | None = None
        self._steps: Iterator[list[Any]] = iter(())
        self._held: list[Any] | None = None
        self._ended: Callable[[], object] = lambda: None

    def __len__(self) -> int:
        """The batches of all Trainers in an epoch."""
        return self._plan.in_epoch * self._plan.parts

    def begin(self, data: ps.Samples, ended: Callable[[], object]) -> None:
        """Yields this Trainer's part of these samples from now on.

        Args:
            data: made for the plan.
            ended: called once all samples are trained.
        """
        collate = _InParts(self._own.collate_fn, self._plan.parts)
        same = {name: getattr(self._own, name) for name in _OF_A_LOADER}
        loader = DataLoader(self.dataset, batch_sampler=data, collate_fn=collate, **same)
        self._data, self._steps = data, iter(data.track(loader))
        self._held, self._ended = None, ended
        self.position, self.is_done = None, False

    def close(self) -> None:
        """Lets go of what reads the batches, and with it of worker processes."""
        self._data, self._held, self._steps = None, None, iter(())

    def __iter__(self) -> Iterator[Any]:
        if self._data is None:
            raise RuntimeError(
                "the batches of every_sample_once=True are given out while trainer.train() runs"
            )
        epoch: int | None = None
        while (now := self.next_position()) is not None:
            epoch = now.epoch if epoch is None else epoch
            if now.epoch > epoch:
                return
            batches, self._held = self._held or (), None
            self.position = now
            yield from batches

    def next_position(self) -> ps.Position | None:
        """Has the next step's batches at hand, and returns its place; None if all is trained."""
        assert self._data is not None
        if self._held is None and not self.is_done:
            self._held = next(self._steps, None)
            if self._held is None:
                self.is_done = True
                self._ended()
        return None if self.is_done else self._data.position


@dataclass(frozen=True, slots=True)
class _InParts:
    """Makes several batches of the samples of a step, of sizes that differ by one at most.

    Args:
        collate: makes one.
        parts: how many.
    """

    collate: Callable[[list[Any]], Any]
    parts: int

    def __call__(self, samples: Sequence[Any]) -> list[Any]:
        bounds = [len(samples) * part // self.parts for part in range(self.parts + 1)]
        return [self.collate(list(samples[begin:end])) for begin, end in itertools.pairwise(bounds)]


class SharedData:
    """One Trainer's share in the data of several.

    Args:
        trainer: whose loader, log and number of epochs are put in order.
        name: of the sampler.
    """

    def __init__(self, trainer: Trainer, name: str) -> None:
        self._trainer = trainer
        self._name = name
        self._loader: SharedLoader | None = None
        self._plan: Plan | None = None
        self._data: ps.Samples | None = None
        own, log, values = (
            trainer.get_train_dataloader,
            trainer.log,
            trainer.set_initial_training_values,
        )

        def get_train_dataloader() -> Any:
            return self._shared(own)

        def log_progress(logs: dict[str, Any], *args: Any, **options: Any) -> None:
            logs.update(self._told(logs))
            log(logs, *args, **options)

        def with_one_more_epoch(*args: Any, **options: Any) -> Any:
            """Adds an epoch for steps that are made twice, as some pushes are refused."""
            epochs, *others = values(*args, **options)
            return (epochs + 1, *others)

        vars(trainer).update(
            get_train_dataloader=get_train_dataloader,
            log=log_progress,
            set_initial_training_values=with_one_more_epoch,
        )

    def _shared(self, own: Callable[[], Any]) -> SharedLoader:
        args = self._trainer.args
        require_fitting(args)
        loader = own()
        self._plan = plan_of(args, loader)
        self._loader = SharedLoader(loader, self._plan)
        args.ignore_data_skip = True  # the account of samples says what is not to be read again
        return self._loader

    def begin(self, cluster: ps.Cluster, state: TrainerState, checkpoint: str | None) -> None:
        """Begins to train what is not trained, before the first step.

        Args:
            cluster: that keeps the account.
            state: of the Trainer.
            checkpoint: the folder that it resumes; None for none.

        Raises:
            DeclarationError: another Trainer has other data, another seed or another batch size.
            ValueError: the servers' rows lack samples that the checkpoint has.
        """
        assert self._plan is not None
        assert self._loader is not None
        data = self._plan.begin(cluster, self._name)
        if checkpoint is not None:
            _require_account(data, Path(checkpoint))
        progress = data.progress
        if progress.trained:
            _logger.warning(
                "%d of the %d samples of %d epochs are trained already, and are not trained again; "
                "%s", progress.trained, progress.total, self._plan.epochs,
                "training resumes with the others" if progress.trained < progress.total else
                "there is nothing left to train",
            )  # fmt: skip
        state.num_train_epochs = self._plan.epochs
        self._data = data
        self._loader.begin(data, cluster.reload)

    # --- steps

    def step_begins(self, schedule: object) -> None:
        """Has the schedule be where all Trainers together are.

        Args:
            schedule: the Trainer's; one that goes by metrics stays as it is.
        """
        position = None if self._loader is None else self._loader.position
        if position is None or isinstance(schedule, ReduceLROnPlateau):
            return
        if isinstance(schedule, LRScheduler):
            made: Any = schedule.optimizer
            made._opt_called = True  # others have made the steps that the schedule lacks
            while schedule.last_epoch < position.number:
                schedule.step()

    def before_step(self, state: TrainerState) -> None:
        """Has the Trainer not stop after as many steps as there are, if some were made twice."""
        state.max_steps = max(state.max_steps, state.global_step + 2)

    def step_ended(self, state: TrainerState) -> None:
        """Has epochs and the bar tell of all Trainers."""
        position = None if self._loader is None else self._loader.position
        if position is not None and self._plan is not None:
            state.epoch = (position.number + 1) / self._plan.in_epoch
            self._show(state, position.number + 1)

    def epoch_ended(self, args: TrainingArguments, state: TrainerState, control: TrainerControl
                    ) -> None:  # fmt: skip
        """Ends training once all samples are trained; saves and evaluates as at its last step."""
        plan, loader = self._plan, self._loader
        assert plan is not None
        assert loader is not None
        if control.should_training_stop or loader.next_position() is not None:
            return
        control.should_training_stop = True
        state.epoch, state.max_steps = float(plan.epochs), plan.steps
        self._show(state, plan.steps)
        if loader.position is None:
            return
        if args.eval_strategy == IntervalStrategy.STEPS and state.global_step % state.eval_steps:
            control.should_evaluate = True
        if args.save_strategy == SaveStrategy.STEPS and state.global_step % state.save_steps:
            control.should_save = True

    @property
    def is_done(self) -> bool:
        """True once all samples of all Trainers are trained."""
        return self._loader is not None and self._loader.is_done

    def ended(self) -> None:
        """Says if training ends and samples are left, and lets go of the loader."""
        if self._data is not None and not self.is_done:
            progress = self._data.progress
            _logger.warning(
                "this Trainer was stopped; %d of %d samples are not trained, which is left to "
                "others", progress.total - progress.trained, progress.total,
            )  # fmt: skip
        self._data = None
        if self._loader is not None:
            self._loader.close()

    def _show(self, state: TrainerState, step: int) -> None:
        for each in self._trainer.callback_handler.callbacks:
            bar: Any = each.training_bar if isinstance(each, ProgressCallback) else None
            if bar is not None:
                each.current_step = state.global_step
                bar.update(max(0, step - bar.n))

    def _told(self, logs: dict[str, Any]) -> dict[str, int]:
        """The progress of all Trainers, for a log that is not of an evaluation."""
        if self._data is None or any(name.startswith("eval_") for name in logs):
            return {}
        progress = self._data.progress
        return {
            "cluster_samples_trained": progress.trained,
            "cluster_samples_left": progress.total - progress.trained,
        }

    # --- checkpoints

    def save(self, folder: Path) -> None:
        """Writes into a checkpoint which samples are trained in the snapshot that follows."""
        if self._data is not None:
            (folder / _ACCOUNT).write_text(json.dumps(self._data.state_dict()))


def _require_account(data: ps.Samples, checkpoint: Path) -> None:
    """Makes sure that the servers' rows have what a checkpoint has."""
    path = checkpoint / _ACCOUNT
    if not path.is_file():
        raise ValueError(
            f"resume_from_checkpoint={str(checkpoint)!r} has no {_ACCOUNT}: it was saved without "
            "every_sample_once=True, and it is not known which samples it has trained; load its "
            "model into a new run"
        )
    data.load_state_dict(json.loads(path.read_text()))


def plan_of(args: TrainingArguments, loader: Any) -> Plan:
    """The plan of a Trainer with this loader.

    Raises:
        ValueError: the loader, or the data set, is one that cannot be shared.
    """
    dataset = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise _unfit("train_dataset", type(dataset).__name__, "needs a data set with a length")
    sampler = loader.batch_sampler
    order = getattr(sampler, "sampler", None)
    if type(sampler) is not BatchSampler or not isinstance(order, (RandomSampler, InOrder)):
        kind = type(sampler if type(sampler) is not BatchSampler else order).__name__
        raise _unfit(
            "get_train_dataloader()", f"a loader with a {kind}",
            "makes the order of samples itself: at random, or "
            "train_sampling_strategy='sequential'",
        )  # fmt: skip
    parts, seed = args.gradient_accumulation_steps, args.data_seed
    plan = Plan(
        length=len(dataset),
        per_step=sampler.batch_size * parts,
        parts=parts,
        shuffle=isinstance(order, RandomSampler),
        seed=args.seed if seed is None else seed,
        epochs=int(args.num_train_epochs),
        drop_last=bool(sampler.drop_last),
    )
    _require_whole_steps(plan)
    return plan


def _require_whole_steps(plan: Plan) -> None:
    if not plan.in_epoch:
        raise _unfit(
            "dataloader_drop_last", True,
            f"leaves no step of {plan.length} samples, as a step has {plan.per_step}",
        )  # fmt: skip
    rest = plan.length % plan.per_step
    if 0 < rest < plan.parts and not plan.drop_last:
        raise _unfit(
            "gradient_accumulation_steps", plan.parts,
            f"would have a last step of each epoch with {rest} samples, fewer than one for each "
            "batch; give dataloader_drop_last=True, or another batch size",
        )  # fmt: skip


def require_fitting(args: TrainingArguments) -> None:
    """Refuses arguments that cannot be honoured.

    Raises:
        ValueError: which, and what to give.
    """
    strategy = getattr(args, "train_sampling_strategy", "random")
    strategy = "group_by_length" if getattr(args, "group_by_length", False) else strategy
    if strategy not in ("random", "sequential"):
        why = "makes the order of samples itself; give 'random' or 'sequential'"
        raise _unfit("train_sampling_strategy", strategy, why)
    if args.max_steps > 0:
        raise _unfit("max_steps", args.max_steps,
                     "ends with the last sample; give num_train_epochs=")  # fmt: skip
    if args.num_train_epochs < 1 or args.num_train_epochs != int(args.num_train_epochs):
        raise _unfit("num_train_epochs", args.num_train_epochs,
                     "trains whole epochs; give a whole number of 1 or more")  # fmt: skip
    if args.world_size > 1:
        raise _unfit("world_size", args.world_size,
                     "is for Trainers that form no process group; call stand_alone()")  # fmt: skip
    if args.auto_find_batch_size:
        raise _unfit("auto_find_batch_size", True,
                     "needs one batch size for all Trainers; give it")  # fmt: skip
    if not getattr(args, "dataloader_in_order", True):
        raise _unfit("dataloader_in_order", False,
                     "needs batches in order; give True")  # fmt: skip


def _unfit(name: str, value: object, why: str) -> ValueError:
    return ValueError(f"{name}={value!r}: every_sample_once=True {why}")
