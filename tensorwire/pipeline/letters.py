"""Letters that stages send to each other: one-way messages, and how they look as bytes.

A letter says by itself which step, stages and micro-batch it belongs to and what shapes its
tensors have, so nobody needs to be told in advance what will come.
"""

from __future__ import annotations

import enum
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from tensorwire.pipeline.trees import map_leaves, map_tensors

STEP: Final = -1
"""Stands for the one who calls ``train_step`` among the stages that send."""


class Content(enum.IntEnum):
    """The kinds of things that a letter brings."""

    ACTIVATION = 0
    """Outputs of a stage, for a later one; from ``STEP``, arguments of the step."""
    GRADIENT = 1
    """Gradients of what a stage got, for the stage that it came from."""
    TARGET = 2
    """The values that the loss compares with."""
    SHARED = 3
    """Gradients of parameters that several stages or replicas share."""


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a letter.

    Args:
        step: the number of the step.
        content: what it brings.
        source: the stage that sends; of ``SHARED``, the number of the sharing's member.
        target: the stage that gets it; of ``SHARED``, the number of the sharing.
        microbatch: of the step.
    """

    step: int
    content: Content
    source: int
    target: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for a tensor in a value without tensors."""

    number: int
    requires_grad: bool


def write(session: str, address: Address, value: Any) -> tuple[bytes, list[torch.Tensor]]:
    """A letter as bytes and tensors.

    Raises:
        TypeError: something in the value that is no tensor cannot be pickled.
    """
    tensors: list[torch.Tensor] = []

    def take(tensor: torch.Tensor) -> _Place:
        tensors.append(tensor.detach())
        return _Place(len(tensors) - 1, tensor.requires_grad)

    plain = map_tensors(value, take)
    head = (address.step, address.content.value, address.source, address.target, address.microbatch)
    try:
        return pickle.dumps((session, head, plain), protocol=5), tensors
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"stage {address.source} returned something besides tensors that cannot be sent to "
            f"stage {address.target}: {error}"
        ) from error


def read(body: bytes, tensors: Sequence[torch.Tensor]) -> tuple[str, Address, Any]:
    """The session, address and value of a letter."""
    session, (step, content, source, target, microbatch), plain = pickle.loads(body)

    def put(place: _Place) -> torch.Tensor:
        return tensors[place.number].requires_grad_(place.requires_grad)

    address = Address(step, Content(content), source, target, microbatch)
    return session, address, map_leaves(plain, _Place, put)
