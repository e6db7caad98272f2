"""Where a tensor goes at the other end, by device maps, and the road through host memory.

Every worker publishes its maps with its address: requests use the sender's map
for the receiver, replies the inverse of the map of the worker that called.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rpc.devices import moves_host
from rpc.errors import DeviceMapError

_HOST = torch.device("cpu")


class DeviceMap:
    """Where this worker's devices are at one peer.

    Args:
        peer_name: for errors.
        mapping: the peer's device for each of ours; host memory needs no entry.

    Attributes:
        moves_host: whether tensors in host memory arrive on a device.
    """

    def __init__(self, peer_name: str, mapping: Mapping[torch.device, torch.device]) -> None:
        self._peer_name = peer_name
        self._mapping = dict(mapping)
        self.moves_host = moves_host(mapping)

    def inverse(self) -> DeviceMap:
        """The map for the way back."""
        return DeviceMap(self._peer_name, {there: here for here, there in self._mapping.items()})

    def check(self, device: torch.device) -> None:
        """Refuses a device that has no place at the peer.

        Raises:
            DeviceMapError: it is not mapped.
        """
        if device != _HOST and device not in self._mapping:
            raise DeviceMapError(
                f"a tensor on {device} cannot be sent to worker {self._peer_name!r}: "
                f"map the device with options.set_device_map({self._peer_name!r}, ...)"
            )

    def destination(self, device: torch.device) -> str:
        """The device at the peer; empty for host memory."""
        there = self._mapping.get(device, device)
        return "" if there == _HOST else str(there)


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself if it is in host memory, else a copy there, same strides."""
    if tensor.device == _HOST:
        return tensor
    pinned = torch.cuda.is_available()
    staged = torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=pinned
    )
    staged.copy_(tensor)
    return staged
