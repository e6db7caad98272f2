"""One stage of a pipeline: its module's forward and backward passes, by micro-batch.

Owns what a micro-batch needs between its passes: the tensors that came in, and where its
graph begins. Knows its neighbours only as numbers; who they are and how tensors get there is
others' business. Gradients add up in the parameters' ``grad`` in the order of the passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parallel import DistributedDataParallel

from tensorwire.pipeline.arrival import changeable, copied
from tensorwire.pipeline.randomness import RandomState, recorded, replayed, seed_of, seeded
from tensorwire.pipeline.split_backward import Gradients, SplitBackward, run_backward
from tensorwire.pipeline.trees import map_tensors, tensors_of
from tensorwire.pipeline.wiring import ALL, FromStage, Wiring

LOSS: Final = -1
"""Stands for the loss among the consumers of the last stage."""

Packet = tuple[Any, ...]
"""The values one stage hands to another: one for each of its sources that is that stage."""


@dataclass(frozen=True, slots=True)
class StageSettings:
    """The way in which a stage runs.

    Args:
        recompute: keep only the inputs of a forward pass, and run it again for the backward pass.
        autocast: the dtype of ``torch.autocast`` for forward passes; None: without it.
        seed: of random numbers; None: as they come.
    """

    recompute: bool = False
    autocast: torch.dtype | None = None
    seed: int | None = None


def settings_of(
    stages: int,
    recompute: bool | Collection[int],
    autocast: torch.dtype | None,
    seed: int | None,
) -> tuple[StageSettings, ...]:
    """The settings of each stage; ``recompute`` names stages, or is for all."""
    return tuple(
        StageSettings(
            recompute if isinstance(recompute, bool) else each in recompute, autocast, seed
        )
        for each in range(stages)
    )


@dataclass(slots=True)
class _Held:
    """The data that a micro-batch needs for its backward pass.

    Args:
        inputs: the tensors that came from each stage.
        routes: for each consumer, the numbers of the output tensors that went there.
        edges: where the gradient of each output tensor goes in; None where none does.
        again: runs the forward pass again, which makes the edges.
        split: the backward pass, if its first part is done.
    """

    inputs: Mapping[int, list[torch.Tensor]]
    routes: Mapping[int, list[int]]
    edges: list[GradientEdge | None] = field(default_factory=list)
    again: Callable[[], list[GradientEdge | None]] | None = None
    split: SplitBackward | None = None

    @property
    def wanted(self) -> list[torch.Tensor]:
        """The inputs whose gradients others wait for."""
        return [each for tensors in self.inputs.values() for each in tensors if each.requires_grad]


class Stage:
    """Runs one stage.

    Args:
        index: its number in the pipeline.
        module: what it computes.
        device: where the module's tensors are.
        wiring: how the stages are connected.
        settings: how it runs.
    """

    def __init__(
        self,
        index: int,
        module: nn.Module,
        device: torch.device,
        wiring: Wiring,
        settings: StageSettings,
    ) -> None:
        self.index = index
        self.module = module
        self.device = device
        self._sources = wiring.sources[index]
        self._sent = {
            consumer: [
                each.output
                for each in wiring.sources[consumer]
                if isinstance(each, FromStage) and each.stage == index
            ]
            for consumer in wiring.consumers(index)
        }
        self._settings = settings
        self._held: dict[int, _Held] = {}
        self.most_held = 0

    def forward(
        self, step: int, microbatch: int, packets: Mapping[int, Packet], given: Mapping[str, Packet]
    ) -> Any:
        """Runs a forward pass without a graph; returns what the module does."""
        with torch.no_grad():
            return self._call(step, microbatch, self._arguments(packets, given))

    def forward_to_train(
        self, step: int, microbatch: int, packets: Mapping[int, Packet], given: Mapping[str, Packet]
    ) -> dict[int, Packet]:
        """Runs a forward pass and keeps what its backward pass needs.

        Args:
            step: the number of the step.
            microbatch: of the step.
            packets: from each producer.
            given: positional arguments of the step under "", and others by keyword.

        Returns:
            What each consumer gets; its tensors have no graph.
        """
        return self._run(step, microbatch, packets, given, lambda output: output, self._sent)

    def forward_to_loss(
        self,
        step: int,
        microbatch: int,
        packets: Mapping[int, Packet],
        given: Mapping[str, Packet],
        loss: Callable[[Any], torch.Tensor],
    ) -> torch.Tensor:
        """Runs the last stage's forward pass as in training; returns the loss, without a graph."""
        sent = self._run(step, microbatch, packets, given, loss, {LOSS: [0]})
        (value,) = sent[LOSS]
        detached: torch.Tensor = value.detach()
        return detached

    def backward(self, microbatch: int, gradients: Mapping[int, Gradients]) -> dict[int, Gradients]:
        """Runs a whole backward pass.

        Args:
            microbatch: whose forward pass was run.
            gradients: from each consumer, for each tensor that it got.

        Returns:
            For each producer, the gradient of each tensor that came from there.
        """
        held = self._held.pop(microbatch)
        edges, roots = self._roots(held, gradients)
        return _deal(held, run_backward(edges, held.wanted, roots))

    def backward_inputs(
        self, microbatch: int, gradients: Mapping[int, Gradients]
    ) -> dict[int, Gradients]:
        """Runs a backward pass but for the weights' gradients, left to :meth:`backward_weights`."""
        held = self._held[microbatch]
        edges, roots = self._roots(held, gradients)
        held.split = SplitBackward(edges, held.wanted)
        held.edges = []
        return _deal(held, held.split.for_inputs(roots))

    def backward_weights(self, microbatch: int) -> None:
        """Adds the gradients of the weights that :meth:`backward_inputs` left."""
        split = self._held.pop(microbatch).split
        assert split is not None, "the table has been checked: I comes before W"
        split.for_weights()

    def packets(self, output: Any) -> dict[int, Packet]:
        """The packet that each consumer gets of an output."""
        elements = elements_of(output)
        return {consumer: _pick(elements, outputs) for consumer, outputs in self._sent.items()}

    def forget(self) -> None:
        """Drops what is held for backward passes."""
        self._held.clear()
        self.most_held = 0

    def _arguments(self, packets: Mapping[int, Packet], given: Mapping[str, Packet]) -> list[Any]:
        values = {stage: iter(packet) for stage, packet in packets.items()}
        arguments: list[Any] = []
        for source in self._sources:
            if not isinstance(source, FromStage):
                arguments.extend(given[source.name])
            elif source.output == ALL:
                arguments.extend(next(values[source.stage]))
            else:
                arguments.append(next(values[source.stage]))
        return arguments

    def _call(self, step: int, microbatch: int, arguments: Sequence[Any]) -> Any:
        with contextlib.ExitStack() as around:
            if self._settings.seed is not None:
                seed = seed_of(self._settings.seed, step, self.index, microbatch)
                around.enter_context(seeded(seed, self.device))
            if self._settings.autocast is not None:
                around.enter_context(torch.autocast(self.device.type, self._settings.autocast))
            if isinstance(self.module, DistributedDataParallel):
                around.enter_context(self.module.no_sync())  # summed when the step ends
            return self.module(*arguments)

    def _run(
        self,
        step: int,
        microbatch: int,
        packets: Mapping[int, Packet],
        given: Mapping[str, Packet],
        finish: Callable[[Any], Any],
        sent: Mapping[int, list[int]],
    ) -> dict[int, Packet]:
        arguments = self._arguments(packets, given)
        inputs = {stage: tensors_of(packet) for stage, packet in packets.items()}

        def compute(arguments: Any) -> tuple[Any, ...]:
            return elements_of(finish(self._call(step, microbatch, changeable(arguments))))

        again = None
        if self._settings.recompute:
            with recorded(self.device) as state, torch.no_grad():
                again = _Replay(partial(compute, arguments), self.device, state)
                elements = compute(copied(arguments))  # which the replay must find unchanged
        else:
            elements = compute(arguments)
        numbered, routes = _route(elements, sent)
        held = _Held(inputs, routes, again=again)
        if again is None:
            held.edges = [_edge(each) for each in numbered]
        self._held[microbatch] = held
        self.most_held = max(self.most_held, len(self._held))
        flows = bool(held.wanted) or any(each.requires_grad for each in self.module.parameters())
        return {
            consumer: _without_graph(_pick(elements, outputs), again is not None and flows)
            for consumer, outputs in sent.items()
        }

    def _roots(
        self, held: _Held, gradients: Mapping[int, Gradients]
    ) -> tuple[list[GradientEdge], list[torch.Tensor | None]]:
        """The tensors at which gradients go in, and their sums."""
        edges = held.edges if held.again is None else held.again()
        sums: list[torch.Tensor | None] = [None] * len(edges)
        # The latest consumer first, as a backward pass in one process comes to them.
        for consumer in sorted(gradients, reverse=True):
            for number, gradient in zip(held.routes[consumer], gradients[consumer], strict=True):
                if gradient is not None:
                    before = sums[number]
                    sums[number] = gradient if before is None else before + gradient
        pairs = [(e, g) for e, g in zip(edges, sums, strict=True) if e is not None]
        return [edge for edge, _ in pairs], [gradient for _, gradient in pairs]


@dataclass(frozen=True, slots=True)
class _Replay:
    """Runs a forward pass again, with a graph and the same random numbers."""

    compute: Callable[[], tuple[Any, ...]]
    device: torch.device
    state: RandomState

    def __call__(self) -> list[GradientEdge | None]:
        with replayed(self.state, self.device), torch.enable_grad():
            return [_edge(each) for each in tensors_of(self.compute())]


def elements_of(output: Any) -> tuple[Any, ...]:
    """A module's outputs: the items of a tuple or list, or else the one value."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def _route(
    elements: tuple[Any, ...], sent: Mapping[int, list[int]]
) -> tuple[list[torch.Tensor], dict[int, list[int]]]:
    """All output tensors, and the numbers of those that go to each consumer."""
    tensors: list[torch.Tensor] = []
    numbers: list[list[int]] = []
    for element in elements:
        inside = tensors_of(element)
        numbers.append(list(range(len(tensors), len(tensors) + len(inside))))
        tensors.extend(inside)
    everything = list(range(len(tensors)))
    routes = {
        consumer: [n for each in outputs for n in (everything if each == ALL else numbers[each])]
        for consumer, outputs in sent.items()
    }
    return tensors, routes


def _pick(elements: tuple[Any, ...], outputs: Sequence[int]) -> Packet:
    return tuple(elements if each == ALL else elements[each] for each in outputs)


def _without_graph(packet: Packet, floats_need_gradients: bool) -> Packet:
    """The same values in tensors that begin a graph of their own."""

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        needs = tensor.requires_grad or (floats_need_gradients and tensor.is_floating_point())
        return tensor.detach().requires_grad_(needs)

    cut_off: Packet = map_tensors(packet, cut)
    return cut_off


def _edge(tensor: torch.Tensor) -> GradientEdge | None:
    return get_gradient_edge(tensor) if tensor.requires_grad else None


def _deal(held: _Held, arrived: Gradients) -> dict[int, Gradients]:
    """Deals the gradients of the wanted inputs out to the stages that they came from."""
    gradients = iter(arrived)
    return {
        stage: [next(gradients) if each.requires_grad else None for each in tensors]
        for stage, tensors in held.inputs.items()
    }
