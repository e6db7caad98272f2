"""Maps devices to those of a peer, and moves tensors through host memory.

Every worker publishes its maps with its address: requests use the sender's map
for the receiver, replies the inverse of the map of the worker that called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from rpc.devices import Direction, check_devices, moves_host

_HOST = torch.device("cpu")


class PeerDeviceMap:
    """The devices of one peer, for each of this worker's.

    Args:
        peer_name: for errors.
        mapping: the peer's device for each of ours; host memory needs no entry.
        direction: of what is sent by it, for errors.

    Attributes:
        moves_host: whether tensors in host memory arrive on a device.
    """

    def __init__(
        self,
        peer_name: str,
        mapping: Mapping[torch.device, torch.device],
        direction: Direction = "Request",
    ) -> None:
        self._peer_name = peer_name
        self._direction = direction
        self._mapping = dict(mapping)
        self.moves_host = moves_host(mapping)

    def inverse(self) -> PeerDeviceMap:
        """The map for the way back."""
        back = {there: here for here, there in self._mapping.items()}
        return PeerDeviceMap(self._peer_name, back, "Response")

    def check(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuses tensors on a device that has no place at the peer.

        Raises:
            DeviceMapError: it is not mapped.
        """
        check_devices(tensors, self._mapping, self._direction, self._peer_name, "TensorWire")

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
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_HOST, pin_memory=pinned
    )
    staged.copy_(tensor)
    return staged


def to_device(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A copy there, ready on the default stream whatever stream is current on this thread."""
    device = torch.device(name)
    if device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.stream(torch.cuda.default_stream(device)):
        return tensor.to(device)
