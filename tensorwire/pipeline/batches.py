"""``Pipeline.batches``: a loop over a loader that knows its place, saves it and comes back to it.

The place goes into checkpoints, and with stage 0 into backups, so that the loop goes on at the
right batch after the driver's death too.
"""

from __future__ import annotations

import itertools
import logging
import pickle
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import torch

from tensorwire import checkpoint
from tensorwire.pipeline.backups.coordinator import Kind
from tensorwire.pipeline.backups.driver_state import OWN
from tensorwire.pipeline.grad_scaler import GradScaler

if TYPE_CHECKING:
    from tensorwire.pipeline.optimizer import PipelineOptimizer
    from tensorwire.pipeline.pipeline import Pipeline

_logger: Final = logging.getLogger("tensorwire")
_PLACE: Final = "batches"

T = TypeVar("T")


class Batch(NamedTuple):
    """A batch of a loader that yields pairs.

    Args:
        x: the first of the pair: the input.
        y: the second: the target.
    """

    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a program that loops over loaders.

    Args:
        loop: the number of the loop, counted from 0.
        done: how many of its batches are done.
        loader: the loader's state, if it has one.
        generator: of torch's default generator when the loop began, if the loader has no state.
        states: of what else the loop keeps, by name.
        groups: the hyperparameters of each optimizer, by its key.
    """

    loop: int
    done: int
    loader: Any
    generator: torch.Tensor | None
    states: Mapping[str, Any]
    groups: Mapping[str, Any]


class Loop:
    """One loop over a loader.

    Args:
        pipeline: which is trained in it.
        number: of the loop in the program, from 0.
        loader: yields batches.
        state: what has its state in this process and goes with the place, by name.
        folder: of checkpoints.
        every: how many batches lie between two checkpoints.
        keep: how many checkpoints stay.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        number: int,
        loader: Iterable[Any],
        state: Mapping[str, Any],
        folder: str | Path | None,
        every: int | None,
        keep: int | None,
    ) -> None:
        self._pipeline = pipeline
        self._number = number
        self._loader = loader
        self._given = dict(state)
        self._folder = None if folder is None else Path(folder)
        self._every = every
        self._keep = keep
        self._generator: torch.Tensor | None = None

    def run(self) -> Iterator[Any]:
        """Yields the batches that are not done yet.

        Raises:
            ValueError: a scheduler has no state in the place that is kept.
        """
        if self._pipeline.driver.is_named or self._folder is not None:
            _require_schedulers(self._pipeline.optimizers.values(), self._state)
        place = self._begin()
        if place is not None and place.loop > self._number:
            return
        done = 0 if place is None else self._return_to(place)
        batches = self._from(place, done)
        while True:
            here = self._here(done)
            self._pipeline.driver.places.now = here
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield _as_batch(batch)
            done += 1
            if self._every is not None and done % self._every == 0:
                self._save(done)

    @property
    def _state(self) -> dict[str, Any]:
        """The objects with state in this process, by name; also the pipeline's scalers, untold."""
        given = list(map(id, self._given.values()))
        own = self._pipeline.driver.places.own().items()
        return {**self._given, **{name: each for name, each in own if id(each) not in given}}

    def _begin(self) -> Place | None:
        """The place that an earlier life of the driver, or a checkpoint, left."""
        if (packed := self._pipeline.driver.places.take()) is not None:
            return _unpacked(packed)
        if self._folder is None:
            return None
        latest = checkpoint.latest(self._folder)
        if latest is None or self._pipeline.steps:
            return None
        loaded = checkpoint.load(latest, {**self._parts(), **self._state})
        saved = loaded[_PLACE]
        _logger.warning("training goes on from the checkpoint %s", latest.path)
        place = Place(saved["loop"], saved["done"], saved["loader"], saved["generator"], {}, {})
        self._pipeline.driver.places.put(pickle.dumps(place))
        taken = self._pipeline.driver.places.take()
        assert taken is not None, "it was just put there"
        return _unpacked(taken)

    def _return_to(self, place: Place) -> int:
        """Gives everything the state that it had; returns how many batches are done."""
        if place.loop < self._number:
            return 0
        state = self._state
        for name, saved in place.states.items():
            if name in state:
                state[name].load_state_dict(saved)
        for key, optimizer in self._pipeline.optimizers.items():
            if key in place.groups:
                optimizer.take_groups(place.groups[key])
        return place.done

    def _from(self, place: Place | None, done: int) -> Iterator[Any]:
        """The loader's batches after those that are done."""
        if done and place is not None and place.loader is not None:
            self._loader.load_state_dict(place.loader)  # type: ignore[attr-defined]
            return iter(self._loader)
        if done and place is not None and place.generator is not None:
            torch.set_rng_state(place.generator)
        self._generator = None if _has_state(self._loader) else torch.get_rng_state()
        if done:
            _logger.warning("passing over the %d batches that are done", done)
        return itertools.islice(iter(self._loader), done, None)

    def _here(self, done: int) -> bytes:
        if not self._pipeline.driver.is_named:
            return b""
        states = {name: each.state_dict() for name, each in self._state.items()}
        groups = {k: each.checkpoint_common() for k, each in self._pipeline.optimizers.items()}
        return pickle.dumps(
            Place(self._number, done, self._loader_state(), self._generator, states, groups)
        )

    def _loader_state(self) -> Any:
        return self._loader.state_dict() if _has_state(self._loader) else None  # type: ignore[attr-defined]

    def _save(self, done: int) -> None:
        assert self._folder is not None, "checked when the loop was made"
        path = self._folder / str(self._pipeline.steps)
        place = {
            "loop": self._number, "done": done, "loader": self._loader_state(),
            "generator": self._generator,
        }  # fmt: skip

        def save() -> None:
            state = {**self._parts(), **self._state, _PLACE: place}
            checkpoint.save(path, state, self._keep, overwrite=True)

        self._pipeline.driver.perform(Kind.ASK, lambda _: save())

    def _parts(self) -> dict[str, Any]:
        """The pipeline and its optimizers."""
        optimizers = self._pipeline.optimizers
        return {"pipeline": self._pipeline, **{f"optimizer{k}": o for k, o in optimizers.items()}}


def require_loop(
    state: Mapping[str, Any], folder: str | Path | None, every: int | None, keep: int | None
) -> None:
    """Checks the arguments of a loop.

    Raises:
        TypeError: an argument is of another type.
        ValueError: they do not go together.
    """
    for name, each in state.items():
        if not isinstance(each, checkpoint.Stateful):
            raise TypeError(
                f"state={{{name!r}: ...}} is a {type(each).__name__}, which has no state_dict and "
                "load_state_dict"
            )
        if name in ("pipeline", _PLACE) or name.startswith(("optimizer", OWN)):
            raise ValueError(f"state={{{name!r}: ...}}: the loop itself uses this name")
    if (folder is None) != (every is None):
        raise ValueError(f"folder={folder!r} and every={every!r} are given together, or neither")
    if every is not None and (not isinstance(every, int) or every < 1):
        raise ValueError(f"every={every!r} must be a positive integer: batches")
    if keep is not None and folder is None:
        raise ValueError(f"keep={keep!r} needs folder= and every=")


def _require_schedulers(optimizers: Iterable[PipelineOptimizer], state: Mapping[str, Any]) -> None:
    """Checks that what changes the hyperparameters is in ``state``, where it seems that any does.

    Raises:
        ValueError: it is not.
    """
    if any(not isinstance(each, GradScaler) for each in state.values()):
        return
    for optimizer in optimizers:
        # Schedulers note the rate that they began with.
        if any("initial_lr" in group for group in optimizer.param_groups):
            raise ValueError(
                f"state={dict(state)!r} has no scheduler, but one changes the learning rate of "
                f'optimizer {optimizer.key!r}: give state={{"scheduler": scheduler}}, so that '
                "it goes on where it was"
            )


def _unpacked(place: bytes) -> Place:
    unpacked: Place = pickle.loads(place)
    return unpacked


def _has_state(loader: object) -> bool:
    return isinstance(loader, checkpoint.Stateful)


def _as_batch(batch: Any) -> Any:
    """A pair with names; anything else as it is."""
    is_pair = type(batch) in (tuple, list) and len(batch) == 2
    return Batch(*batch) if is_pair else batch
