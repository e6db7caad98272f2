"""Splits what a step is given into micro-batches, and puts their outputs together again.

Tensors are split along their first dimension, as evenly as can be. A list is taken as
micro-batches that are ready; they may differ in shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tensorwire.pipeline.arrival import copied
from tensorwire.pipeline.trees import map_tensors, tensors_of


@dataclass(frozen=True, slots=True)
class Given:
    """The arguments of a step for one micro-batch.

    Args:
        positional: in order.
        keywords: by name.
        target: what the loss compares with.
    """

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    target: Any

    def copied(self) -> Given:
        """The same in other memory."""
        return Given(copied(self.positional), copied(dict(self.keywords)), copied(self.target))


def split(
    positional: Sequence[Any], keywords: Mapping[str, Any], target: Any, microbatches: int
) -> list[Given]:
    """Splits the arguments of a step.

    Args:
        positional: in order.
        keywords: by name.
        target: what the loss compares with.
        microbatches: how many; lists that are ready say it themselves.

    Raises:
        ValueError: lists differ in length, or a tensor has too few rows.
    """
    everything = [*positional, *keywords.values(), target]
    counts = sorted({len(each) for each in everything if isinstance(each, list)})
    if len(counts) > 1 or counts == [0]:
        raise ValueError(f"lists of micro-batches must be equally long, but have lengths {counts}")
    count = counts[0] if counts else microbatches
    columns = [_split(each, count) for each in everything]
    names = list(keywords)
    return [
        Given(tuple(row[: len(positional)]), dict(zip(names, row[len(positional) :], strict=False)),
              row[-1])
        for row in zip(*columns, strict=True)
    ]  # fmt: skip


def require_no_gradients(positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
    """Refuses arguments of a training step whose gradients somebody may wait for in vain.

    Raises:
        ValueError: a tensor requires a gradient.
    """
    named = {f"argument {place}": each for place, each in enumerate(positional)}
    for name, value in {**named, **keywords}.items():
        if any(each.requires_grad for each in tensors_of(value)):
            raise ValueError(
                f"{name} of the step requires a gradient, and a pipeline computes none for what it "
                "is given; have a stage compute it, or give it as .detach()"
            )


def rows_of(given: Given) -> int:
    """The number of rows of a micro-batch: those of its first tensor that has any, or else 1."""
    tensors = tensors_of([given.positional, dict(given.keywords)])
    return next((len(each) for each in tensors if each.dim()), 1)


def merge(outputs: Sequence[Any]) -> Any:
    """Puts the outputs of all micro-batches together, tensor by tensor along the rows."""
    columns = [iter(each) for each in zip(*(tensors_of(output) for output in outputs), strict=True)]
    merged = iter([torch.cat(list(column)) for column in columns])
    return map_tensors(outputs[0], lambda _: next(merged))


def _split(value: Any, count: int) -> list[Any]:
    if isinstance(value, list):
        return value
    columns = []
    for tensor in tensors_of(value):
        if tensor.dim() and len(tensor) < count:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} has too few rows for {count=}"
            )
        columns.append(tensor.tensor_split(count) if tensor.dim() else (tensor,) * count)
    return [_nth(value, columns, number) for number in range(count)]


def _nth(value: Any, columns: Sequence[Sequence[torch.Tensor]], number: int) -> Any:
    pieces = iter([column[number] for column in columns])
    return map_tensors(value, lambda _: next(pieces))
