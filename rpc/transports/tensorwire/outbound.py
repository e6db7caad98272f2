"""Checks of a frame before it is sent: its tensors can travel, and it is not too large."""

from __future__ import annotations

import torch

from rpc.errors import EncodeError
from rpc.transports.base import Frame
from rpc.transports.host.frame_table import Look, look_at
from rpc.transports.tensorwire.device_maps import PeerDeviceMap

_MAX_HEADER_BYTES = 1 << 28


def look_at_all(tensors: tuple[torch.Tensor, ...], devices: PeerDeviceMap) -> tuple[Look, ...]:
    """Looks at the tensors of a frame.

    Args:
        tensors: of the frame.
        devices: where this worker's devices are at the other end.

    Raises:
        DeviceMapError: a tensor is on a device that has no place there.
    """
    for tensor in tensors:
        if not tensor.is_cpu:
            devices.check(tensors)
            break
    return tuple(map(look_at, tensors))


def checked_size(frame: Frame, looks: tuple[Look, ...], limit: int) -> int:
    """The size of a frame in bytes.

    Args:
        frame: with a payload and tensors.
        looks: at its tensors.
        limit: the most bytes of a message.

    Raises:
        EncodeError: it is too large to be sent.
    """
    payload = frame.payload
    size = len(frame.header)
    if size > _MAX_HEADER_BYTES:
        raise EncodeError(f"message header of {size} bytes; the limit is {_MAX_HEADER_BYTES}")
    size += payload.nbytes if isinstance(payload, memoryview) else len(payload)
    for look in looks:
        size += look.nbytes
    if size > limit:
        raise EncodeError(f"message of {size} bytes; the limit is {limit} (max_message_bytes)")
    return size
