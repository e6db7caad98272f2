"""Measures what each layer of a model takes, and cuts it into even stages."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import nn

from tensorwire.pipeline.trees import map_tensors, tensors_of

Balance: TypeAlias = Literal["memory", "time"]
"""The quantity that is to be the same in all stages."""

_RUNS: Final = 3


def costs_of(model: nn.Sequential, arguments: tuple[Any, ...], balance: Balance) -> list[float]:
    """The cost of each layer with one micro-batch: seconds, or bytes.

    Args:
        model: its layers.
        arguments: for the first.
        balance: "time" of a forward and a backward pass, or "memory" of parameters and of what
            is kept for the backward pass.

    Raises:
        ValueError: ``balance`` is something else.
    """
    if balance not in ("memory", "time"):
        raise ValueError(f"balance={balance!r} must be 'memory' or 'time'")
    measure = _bytes if balance == "memory" else _seconds
    costs = []
    for layer in model.children():
        runs = 1 if balance == "memory" else _RUNS
        costs.append(statistics.median(measure(layer, arguments) for _ in range(runs)))
        with torch.no_grad():
            arguments = (layer(*arguments),)
    for parameter in model.parameters():
        parameter.grad = None
    return costs


def even_cuts(costs: Sequence[float], stages: int) -> list[int]:
    """The first layers of all stages but the first, such that the costliest costs least.

    Args:
        costs: of each layer, at least as many as stages.
        stages: how many.
    """
    sums = [0.0, *itertools.accumulate(costs)]
    # best[end]: the least that the costliest stage can cost among those before ``end``.
    best: list[float] = list(sums)
    cuts: list[dict[int, int]] = []
    for stage in range(1, stages):
        cheapest: list[float] = [float("inf")] * len(sums)
        chosen: dict[int, int] = {}
        for end in range(stage + 1, len(sums)):
            for start in range(stage, end):
                cost = max(best[start], sums[end] - sums[start])
                if cost < cheapest[end]:
                    cheapest[end], chosen[end] = cost, start
        best = cheapest
        cuts.append(chosen)
    starts: list[int] = []
    end = len(costs)
    for chosen in reversed(cuts):
        end = chosen[end]
        starts.append(end)
    return starts[::-1]


def _seconds(layer: nn.Module, arguments: tuple[Any, ...]) -> float:
    fresh = _leaves(arguments)
    began = time.perf_counter()
    outputs = [each for each in tensors_of(layer(*fresh)) if each.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(each) for each in outputs])
    return time.perf_counter() - began


def _bytes(layer: nn.Module, arguments: tuple[Any, ...]) -> float:
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = layer(*_leaves(arguments))  # held until all is counted
    for each in [*layer.parameters(), *layer.buffers()]:
        note(each.detach())
    del output
    return float(sum(kept.values()))


def _leaves(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same values as tensors whose gradients are asked for."""

    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().requires_grad_(tensor.is_floating_point())

    made: tuple[Any, ...] = map_tensors(arguments, leaf)
    return made
