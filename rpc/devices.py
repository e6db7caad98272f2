"""Device maps: which device of one worker stands for which of another.

Decides whether the maps of a whole group agree, what the reverse of a map is,
and which devices a worker uses. Moving tensors is the transports' business.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from rpc.errors import DeviceMapError

DeviceLike = int | str | torch.device
DeviceMap = dict[torch.device, torch.device]
Direction = Literal["Request", "Response"]

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """The facts that one worker tells the others about its devices.

    Args:
        count: how many CUDA devices it has.
        devices: those it lets RPC use; empty means those its maps name.
        maps: by destination worker, its own devices to the destination's.
    """

    count: int = 0
    devices: tuple[torch.device, ...] = ()
    maps: Mapping[str, DeviceMap] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Plain lists and strings, for a record in the store."""
        return {
            "count": self.count,
            "devices": [str(device) for device in self.devices],
            "maps": {
                to: {str(source): str(target) for source, target in device_map.items()}
                for to, device_map in self.maps.items()
            },
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DeviceInfo:
        """The inverse of ``to_json``."""
        return cls(
            int(data["count"]),
            tuple(torch.device(device) for device in data["devices"]),
            {to: as_device_map(device_map) for to, device_map in data["maps"].items()},
        )


def as_device(device: DeviceLike) -> torch.device:
    """Returns the device that is meant: a number means that CUDA device.

    Raises:
        TypeError: it is none of these.
        RuntimeError: torch knows no such device.
    """
    try:
        if isinstance(device, int) and not isinstance(device, bool):
            return torch.device("cuda", device)
        return torch.device(device)
    except (TypeError, RuntimeError) as error:
        raise type(error)(
            f"{device!r} is no device; give the number of a CUDA device, a torch.device, "
            "or a name such as 'cuda:0' or 'cpu'"
        ) from error


def as_device_map(device_map: Mapping[Any, DeviceLike]) -> DeviceMap:
    """Normalizes a map from source to target devices.

    Raises:
        TypeError: if it is no map.
        ValueError: if two sources share a target.
    """
    if not isinstance(device_map, Mapping):
        raise TypeError(
            f"device_map={device_map!r} is a {type(device_map).__name__}, not a map of this "
            "worker's devices to the other's, such as {'cuda:0': 'cuda:1'}"
        )
    forward: DeviceMap = {}
    backward: DeviceMap = {}
    for key, value in device_map.items():
        source, target = as_device(key), as_device(value)
        if target in backward:
            raise ValueError(
                "`device_map` only supports 1-to-1 mapping, "
                f"trying to map {source} and {backward[target]} to {target}"
            )
        forward[source], backward[target] = target, source
    return forward


def moves_host(device_map: Mapping[torch.device, torch.device]) -> bool:
    """True if tensors in host memory arrive on a device: without an entry they do not."""
    return device_map.get(_CPU, _CPU) != _CPU


def lands_on_device(
    tensors: Iterable[torch.Tensor], device_map: Mapping[torch.device, torch.device]
) -> bool:
    """True if one of these tensors arrives elsewhere than in host memory."""
    return any(device_map.get(tensor.device, tensor.device) != _CPU for tensor in tensors)


def note_host_moves(
    moves: set[tuple[int, bool]], peer: int, *, in_requests: bool, in_replies: bool
) -> None:
    """Notes whether tensors in host memory arrive on a device of a peer.

    Args:
        moves: peers where they do, each with True for requests and False for replies.
        peer: its id.
        in_requests: whether the map for requests to it says so.
        in_replies: whether the map for replies to it does.
    """
    for is_request, moved in ((True, in_requests), (False, in_replies)):
        (moves.add if moved else moves.discard)((peer, is_request))


def reverse(device_map: Mapping[torch.device, torch.device]) -> DeviceMap:
    """The inverse of a device map, which replies follow."""
    return {target: source for source, target in device_map.items()}


def used_devices(info: DeviceInfo, reverse_maps: Iterable[DeviceMap] = ()) -> list[torch.device]:
    """The CUDA devices a worker has to be ready to use, in the order of their index."""
    if info.devices:
        return sorted(info.devices, key=_index)
    named = {device for device_map in (*info.maps.values(), *reverse_maps) for device in device_map}
    return sorted(named - {_CPU}, key=_index)


def check_present(devices: Iterable[torch.device]) -> None:
    """Checks that this process has these devices.

    Raises:
        DeviceMapError: naming those that it lacks.
    """
    count = torch.cuda.device_count()
    lacking = [device for device in devices if not _exist([device], count)]
    if lacking:
        names = ", ".join(sorted(map(str, lacking)))
        raise DeviceMapError(
            f"a device map leads to {names}, but this process has {count} CUDA devices; map to "
            "one that it has"
        )


def local_device_info(maps: Mapping[str, DeviceMap], devices: Sequence[torch.device]) -> DeviceInfo:
    """Describes this process's devices, given its options."""
    return DeviceInfo(torch.cuda.device_count(), tuple(devices), maps)


def check_devices(
    tensors: Iterable[torch.Tensor],
    device_map: Mapping[torch.device, torch.device],
    direction: Direction,
    destination: str,
    backend: str = "TensorPipe",
) -> None:
    """Checks that every tensor has a place at ``destination``.

    Raises:
        DeviceMapError: naming the device that the map lacks.
    """
    for tensor in tensors:
        device = tensor.device
        if device.type != "cpu" and device not in device_map:
            raise DeviceMapError(
                f"{backend} RPC backend only supports CPU tensors by default: move the tensors "
                "to the CPU before sending them, or name their device with `set_device_map` on "
                f"`{backend}RpcBackendOptions`. {direction} device mapping is not available for "
                f"destination {destination} and a tensor on device {device}"
            )


def validate_device_maps(infos: Mapping[str, DeviceInfo], *, all_known: bool = True) -> None:
    """Checks the maps of a group against each other.

    Args:
        infos: by worker name.
        all_known: every worker of the group is in ``infos``, so that a map to any
            other name is a mistake; False in a group that workers may yet join.

    Raises:
        ValueError: naming the first worker at fault, and what is wrong with its map.
    """
    for name, info in infos.items():
        _check_devices(name, info)
    for name, info in infos.items():
        if all_known and not info.maps.keys() <= infos.keys():
            raise ValueError(
                f"Node {name} has invalid target node names in its device maps\n"
                f"device maps = {sorted(info.maps)}\nnode names = {sorted(infos)}"
            )
        for to, device_map in info.maps.items():
            _check_map(name, info, to, device_map)
            if to in infos:
                _check_end(name, "target", device_map.values(), infos[to], to, device_map)


def _check_devices(name: str, info: DeviceInfo) -> None:
    listed = list(info.devices)
    if len(set(listed)) != len(listed):
        raise ValueError(f"Node {name} has duplicated devices\ndevices = {listed}")
    if not _exist(listed, info.count):
        raise ValueError(
            f"Node {name} has devices with invalid indices\n"
            f"devices = {listed}\ndevice count = {info.count}"
        )


def _check_map(name: str, info: DeviceInfo, to: str, device_map: DeviceMap) -> None:
    if len(set(device_map.values())) != len(device_map):
        raise ValueError(
            f"Node {name} has duplicated target devices in its device map for {to}\n"
            f"device map = {device_map}"
        )
    _check_end(name, "source", device_map, info, to, device_map)


def _check_end(
    name: str,
    side: str,
    used: Iterable[torch.device],
    info: DeviceInfo,
    to: str,
    device_map: DeviceMap,
) -> None:
    if info.devices:
        if not set(used) - {_CPU} <= set(info.devices):
            raise ValueError(
                f"Node {name} has unexpected {side} devices in its device map for {to}\n"
                f"device map = {device_map}\ndevices = {list(info.devices)}"
            )
    elif not _exist(used, info.count):
        raise ValueError(
            f"Node {name} has {side} devices with invalid indices in its device map for {to}\n"
            f"device map = {device_map}\ndevice count = {info.count}"
        )


def _exist(devices: Iterable[torch.device], count: int) -> bool:
    return all(
        device.type == "cpu" or (device.type == "cuda" and 0 <= _index(device) < count)
        for device in devices
    )


def _index(device: torch.device) -> int:
    return -1 if device.index is None else device.index
