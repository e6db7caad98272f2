"""Random numbers of a stage: seeded for each micro-batch, or kept so that they can be drawn again.

With a seed, what a stage draws depends on the seed, the step, the stage and the
micro-batch, and on nothing else: neither on the schedule nor on who else draws. torch's
default generators belong to the process, so of several workers in one process only one
at a time draws numbers that matter.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_generators = threading.RLock()
"""Guards the state of torch's default generators, which belong to the process."""

_PRIME = 0x9E3779B97F4A7C15  # of splitmix64, which spreads neighbouring numbers far apart


def seed_of(seed: int, step: int, stage: int, microbatch: int) -> int:
    """Returns the seed of one stage's forward pass of one micro-batch.

    Args:
        seed: of the pipeline.
        step: number of the step.
        stage: number of the stage.
        microbatch: number of the micro-batch.
    """
    mixed = seed
    for number in (step, stage, microbatch):
        mixed = (mixed + number + 1) * _PRIME % 2**64
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        mixed ^= mixed >> 31
    return mixed % 2**63


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of the generators that a stage on some device draws from."""

    cpu: torch.Tensor
    device: torch.Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> RandomState:
        """The states as they are."""
        on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_gpu)

    def restore(self, device: torch.device) -> None:
        """Puts the generators back into these states."""
        torch.set_rng_state(self.cpu)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, random numbers come from a seed; afterwards as if nothing had been drawn."""
    with _generators:
        before = RandomState.now(device)
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        try:
            yield
        finally:
            before.restore(device)


@contextlib.contextmanager
def recorded(device: torch.device) -> Iterator[RandomState]:
    """Inside, random numbers come as ever; yields the state from which they come."""
    with _generators:
        yield RandomState.now(device)


@contextlib.contextmanager
def replayed(state: RandomState, device: torch.device) -> Iterator[None]:
    """Inside, the same numbers come as after ``state``; afterwards as if none had been drawn."""
    with _generators:
        before = RandomState.now(device)
        state.restore(device)
        try:
            yield
        finally:
            before.restore(device)
