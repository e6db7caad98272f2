"""Copies of a stage: parameters, buffers, gradients, the optimizers' state, as bytes on the CPU.

Random numbers need no copy: in a pipeline with backups they come of its seed, the step, the stage
and the micro-batch. A copy has a checksum, which is looked at when it has been sent and when a
stage is made of it.
"""

from __future__ import annotations

import copy
import pickle
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import nn

from tensorwire.pipeline.backups.places import Seat
from tensorwire.pipeline.errors import PipelineError

Key: TypeAlias = tuple[str, ...]
"""Names a tensor: its kind, and its name there; of an optimizer's, also which and which field."""

_PARAMETER, _BUFFER, _GRADIENT, _OPTIMIZER = "parameter", "buffer", "gradient", "optimizer"
_BLOCK: Final = 512
"""Words whose sum is one number of those that the checksum is computed of."""


@dataclass(frozen=True, slots=True)
class Rest:
    """The state of a stage that is no tensor.

    Args:
        modes: of each submodule, whether it is in training mode.
        wanted: of each parameter, whether it requires a gradient.
        extra: of submodules that have some, their extra state.
        optimizers: for each optimizer and parameter, the fields that are no tensors.
        on_cpu: tensors of optimizers that are on the CPU whatever the stage's device is.
        kept: the driver's own state.
    """

    modes: Mapping[str, bool] = field(default_factory=dict)
    wanted: Mapping[str, bool] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    optimizers: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    on_cpu: frozenset[Key] = frozenset()
    kept: bytes = b""


@dataclass(frozen=True, slots=True)
class StageCopy:
    """A copy of one seat's state at one version."""

    seat: Seat
    tensors: Mapping[Key, torch.Tensor]
    rest: Rest
    checksum: int

    def require_whole(self) -> None:
        """Checks the checksum.

        Raises:
            PipelineError: the copy is not what was copied.
        """
        if (actual := checksum(self.tensors, self.rest)) != self.checksum:
            raise PipelineError(
                f"the copy of {self.seat} is damaged: its checksum is {actual:08x}, not "
                f"{self.checksum:08x}"
            )


class Draft:
    """A copy that is being made.

    What a forward pass may change is copied at once, and the rest by :meth:`finish`, which must
    be called before the optimizer steps.

    Args:
        seat: of the stage.
        module: of the stage.
        optimizers: some of whose parameters may be the stage's.
        kept: the driver's own state.
    """

    def __init__(
        self,
        seat: Seat,
        module: nn.Module,
        optimizers: Mapping[str, torch.optim.Optimizer],
        kept: bytes,
    ) -> None:
        self._seat = seat
        parameters = dict(module.named_parameters())
        self._early: dict[Key, torch.Tensor] = {
            (_BUFFER, name): buffer.detach().to("cpu", copy=True)
            for name, buffer in module.named_buffers()
        }
        self._late: dict[Key, torch.Tensor] = {}
        for name, parameter in parameters.items():
            self._late[_PARAMETER, name] = parameter.detach()
            if parameter.grad is not None:
                self._early[_GRADIENT, name] = parameter.grad.detach().to("cpu", copy=True)
        fields = dict(_fields(parameters, optimizers))
        self._late.update({k: v for k, v in fields.items() if isinstance(v, torch.Tensor)})
        others: dict[str, dict[str, dict[str, Any]]] = {key: {} for key in optimizers}
        for (_, key, name, what), value in fields.items():
            own = others[key].setdefault(name, {})
            if not isinstance(value, torch.Tensor):
                own[what] = copy.deepcopy(value)
        self._rest = Rest(
            {name: each.training for name, each in module.named_modules()},
            {name: each.requires_grad for name, each in parameters.items()},
            dict(_extra_states(module)),
            others,
            frozenset(k for k, v in self._late.items() if k[0] == _OPTIMIZER and v.is_cpu),
            kept,
        )

    def finish(self, recycled: Mapping[Key, torch.Tensor]) -> StageCopy:
        """Copies the rest.

        Args:
            recycled: tensors that nobody needs, which are written to where they fit.
        """
        tensors = dict(self._early)
        with torch.no_grad():
            for key, tensor in self._late.items():
                tensors[key] = copied_into(recycled.get(key), tensor)
        return StageCopy(self._seat, tensors, self._rest, checksum(tensors, self._rest))


def copied_into(place: torch.Tensor | None, tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, in the memory of ``place`` if that is alike."""
    if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    return place.copy_(tensor)


def restore(copied: StageCopy, module: nn.Module) -> None:
    """Puts a stage into the state of a copy, but for its optimizers.

    Raises:
        PipelineError: the copy is damaged, or of another module.
    """
    copied.require_whole()
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    _require_same_names(copied, parameters, buffers)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.requires_grad_(copied.rest.wanted[name])
            parameter.copy_(copied.tensors[_PARAMETER, name])
            gradient = copied.tensors.get((_GRADIENT, name))
            parameter.grad = None if gradient is None else _like(gradient, parameter)
        for name, buffer in buffers.items():
            buffer.copy_(copied.tensors[_BUFFER, name])
    for name, each in module.named_modules():
        each.training = copied.rest.modes.get(name, each.training)
        if name in copied.rest.extra:
            each.set_extra_state(copied.rest.extra[name])


def restore_optimizer(
    copied: StageCopy, key: str, module: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    """Gives an optimizer the state that it had for a stage's parameters."""
    parameters = dict(module.named_parameters())
    states = {name: dict(fields) for name, fields in copied.rest.optimizers.get(key, {}).items()}
    for at, tensor in copied.tensors.items():
        if at[0] == _OPTIMIZER and at[1] == key:
            parameter = parameters[at[2]]
            place = torch.device("cpu") if at in copied.rest.on_cpu else parameter.device
            states[at[2]][at[3]] = tensor.to(place, copy=True)
    for name, state in states.items():
        optimizer.state[parameters[name]] = state


def checksum(tensors: Mapping[Key, torch.Tensor], rest: Rest) -> int:
    """A number that differs if a bit does; sums of blocks of words, and a CRC over these."""
    total = zlib.crc32(pickle.dumps(rest.kept))
    for key in sorted(tensors):
        tensor = tensors[key]
        total = zlib.crc32(repr((key, tuple(tensor.shape), tensor.dtype)).encode(), total)
        total = zlib.crc32(_sums(tensor), total)
    return total


def _sums(tensor: torch.Tensor) -> bytes:
    octets = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    words = octets[: len(octets) // 8 * 8]
    if words.storage_offset() % 8:
        words = words.clone()
    numbers = words.view(torch.int64)
    blocks = numbers[: len(numbers) // _BLOCK * _BLOCK].view(-1, _BLOCK).sum(1)
    rest = octets[len(blocks) * _BLOCK * 8 :]
    return bytes(blocks.numpy().data) + bytes(rest.numpy().data)


def _fields(
    parameters: Mapping[str, nn.Parameter], optimizers: Mapping[str, torch.optim.Optimizer]
) -> Iterator[tuple[tuple[str, str, str, str], Any]]:
    for key, optimizer in optimizers.items():
        for name, parameter in parameters.items():
            if parameter in optimizer.state:
                for what, value in optimizer.state[parameter].items():
                    yield (_OPTIMIZER, key, name, what), value


def _extra_states(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, each in module.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            yield name, copy.deepcopy(each.get_extra_state())


def _require_same_names(
    copied: StageCopy, parameters: Mapping[str, Any], buffers: Mapping[str, Any]
) -> None:
    there = {key for key in copied.tensors if key[0] in (_PARAMETER, _BUFFER)}
    here = {(_PARAMETER, each) for each in parameters} | {(_BUFFER, each) for each in buffers}
    if there != here:
        raise PipelineError(
            f"the copy of {copied.seat} is of another module: {sorted(there ^ here)} are not in "
            "both"
        )


def _like(gradient: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return gradient.to(parameter.device, copy=True)
