"""Random numbers of one worker among others of its process: from a seed, or drawn again.

torch's default generators belong to the process, so of several workers in one process only one
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


def require_seed(seed: object) -> None:
    """Raises if ``seed=`` is neither None nor a seed of torch's generators.

    Raises:
        TypeError: it is no whole number.
        ValueError: it is negative, or not less than 2**64.
    """
    if seed is None:
        return
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed={seed!r} is a {type(seed).__name__}, not a whole number")
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed} must be at least 0 and less than 2**64")


@dataclass(frozen=True, slots=True)
class RandomState:
    """The states of the generators that a module on some device draws from."""

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
    """Draws random numbers from a seed in the block; afterwards as if nothing had been drawn."""
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
    """Draws random numbers as ever in the block; yields the state from which they come."""
    with _generators:
        yield RandomState.now(device)


@contextlib.contextmanager
def replayed(state: RandomState, device: torch.device) -> Iterator[None]:
    """Draws the same numbers as after ``state`` in the block; afterwards as if none were drawn."""
    with _generators:
        before = RandomState.now(device)
        state.restore(device)
        try:
            yield
        finally:
            before.restore(device)
