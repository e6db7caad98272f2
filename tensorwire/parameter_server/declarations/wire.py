"""The packing of rows between trainers and servers, which pays between hosts, not on one.

What a lossy kind leaves out of a gradient is not lost: the trainer adds it to the next gradient
of the same row (``client.feedback``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from tensorwire.parameter_server.declarations.arguments import instance, number

_TINY: Final = 1e-30

Packed = tuple[Tensor, ...]
"""Rows as a ``Wire`` packed them."""


class Kind:
    """Base of the kinds of packing: how float32 rows become other tensors, and back."""

    @property
    def is_exact(self) -> bool:
        """True if what arrives is what was sent."""
        return False

    def pack(self, rows: Tensor) -> Packed:
        """Packs ``(n, dim)`` rows."""
        raise NotImplementedError

    def unpack(self, packed: Packed, width: int) -> Tensor:
        """The rows, as ``(n, width)`` float32."""
        raise NotImplementedError


@dataclass(frozen=True)
class Float32(Kind):
    """Packs nothing: rows travel as they are."""

    @property
    def is_exact(self) -> bool:
        """True."""
        return True

    def pack(self, rows: Tensor) -> Packed:
        """Packs ``(n, dim)`` rows."""
        return (rows,)

    def unpack(self, packed: Packed, width: int) -> Tensor:
        """The rows, as ``(n, width)`` float32."""
        return packed[0]


@dataclass(frozen=True)
class BFloat16(Kind):
    """Half the bytes, three decimal digits."""

    def pack(self, rows: Tensor) -> Packed:
        """Packs ``(n, dim)`` rows."""
        return (rows.bfloat16(),)

    def unpack(self, packed: Packed, width: int) -> Tensor:
        """The rows, as ``(n, width)`` float32."""
        return packed[0].float()


@dataclass(frozen=True)
class Float16(Kind):
    """Half the bytes, four decimal digits, nothing above 65504."""

    def pack(self, rows: Tensor) -> Packed:
        """Packs ``(n, dim)`` rows."""
        return (rows.clamp(-65504.0, 65504.0).half(),)

    def unpack(self, packed: Packed, width: int) -> Tensor:
        """The rows, as ``(n, width)`` float32."""
        return packed[0].float()


@dataclass(frozen=True)
class Int8(Kind):
    """A quarter of the bytes: whole numbers from -127 to 127 and one scale for each row."""

    def pack(self, rows: Tensor) -> Packed:
        """Packs ``(n, dim)`` rows."""
        scale = rows.abs().amax(1, keepdim=True).clamp_min_(_TINY) / 127
        return (rows / scale).round_().to(torch.int8), scale

    def unpack(self, packed: Packed, width: int) -> Tensor:
        """The rows, as ``(n, width)`` float32."""
        return packed[0].float() * packed[1]


@dataclass(frozen=True)
class TopK(Kind):
    """Sends of each row only the largest numbers, with where they are.

    For pushes; pulls travel as float32, since what is left out of a weight would be missing.

    Args:
        share: of the numbers that travel, above 0 and below 1.
    """

    share: float = 0.25

    def __post_init__(self) -> None:
        number("TopK", "share", self.share, below=1.0)
        if not self.share:
            raise ValueError("TopK: share=0 would send nothing")

    def pack(self, rows: Tensor) -> Packed:
        """Packs ``(n, dim)`` rows."""
        count = max(1, round(rows.shape[1] * self.share))
        where = rows.abs().topk(count, dim=1, sorted=False).indices
        return rows.gather(1, where), where.to(torch.int32)

    def unpack(self, packed: Packed, width: int) -> Tensor:
        """The rows, as ``(n, width)`` float32."""
        values, where = packed
        rows = torch.zeros(values.shape[0], width)
        return rows.scatter_(1, where.long(), values)


FLOAT32: Final = Float32()


@dataclass(frozen=True)
class Wire:
    """The kind of packing for each way.

    Args:
        push: gradients, from trainers to servers.
        pull: rows, from servers to trainers.
    """

    push: Kind = field(default=FLOAT32)
    pull: Kind = field(default=FLOAT32)

    def __post_init__(self) -> None:
        instance("Wire", "push", self.push, Kind, "a kind such as ps.BFloat16()")
        instance("Wire", "pull", self.pull, Kind, "a kind such as ps.BFloat16()")
        if isinstance(self.pull, TopK):
            raise ValueError("Wire: pull=TopK would leave out weights; it is for pushes only")


def both_ways(kind: Kind | Wire) -> Wire:
    """Returns the same kind for both directions; of ``TopK`` only for pushes.

    Raises:
        TypeError: it is neither a kind nor a ``Wire``.
    """
    if isinstance(kind, Wire):
        return kind
    instance("wire", "wire", kind, Kind, "a kind such as ps.BFloat16(), or a ps.Wire")
    return Wire(kind, FLOAT32 if isinstance(kind, TopK) else kind)
