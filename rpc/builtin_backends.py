"""The backends that come with the library, and which of them is the default.

Forming a group is the same for all of them: start the transport, meet the
others at the store, tell the agent who they are. A backend only says which
transport, and what its options mean to it.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from torch._C._distributed_c10d import Store

from rpc.agent import Agent
from rpc.backend_registry import BackendType, BackendValue, add_once, backend_registered
from rpc.bring_up import address_towards, form_group, prefers_tcp
from rpc.devices import DeviceInfo, local_device_info, validate_device_maps
from rpc.group.keys import read_group_key
from rpc.group.records import Record
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpc.transports.tensorpipe.address import TensorPipeAddress
from rpc.transports.tensorpipe.torch_agent import available as tensorpipe_available
from rpc.transports.tensorpipe.transport import TensorPipeTransport
from rpc.transports.tensorwire import TensorWireRpcBackendOptions, TensorWireTransport
from rpc.transports.tensorwire.address import TensorWireAddress

TENSORPIPE = "TENSORPIPE"
TENSORWIRE = "TENSORWIRE"

_INFINIBAND: Final = Path("/sys/class/infiniband")
_logger = logging.getLogger("rpc")


class TensorPipeAgent(Agent):
    """A worker connected by TENSORPIPE; ``init_rpc`` makes it. See :class:`rpc.RpcAgent`."""


def register_builtin_backends() -> None:
    """Makes the built-in backends known; does nothing the second time."""
    add_once(TENSORPIPE, BackendValue(TensorPipeRpcBackendOptions, _init_tensorpipe))
    add_once(TENSORWIRE, BackendValue(TensorWireRpcBackendOptions, _init_tensorwire))


def default_backend(options: RpcBackendOptions | None, preferred: str | None) -> BackendType:
    """The backend for a program that names none: that of its options, or TENSORWIRE.

    Args:
        options: what the program passed; their class says which backend they are for.
        preferred: the value of the environment variable ``RPC_BACKEND``, if set.

    Raises:
        TypeError: the options are of no known backend.
        ValueError: ``preferred`` names none.
    """
    if options is None:
        name = preferred or _default_name()
        if not backend_registered(name):
            known = ", ".join(BackendType.__members__)
            raise ValueError(f"RPC_BACKEND={name!r} is no backend; there are: {known}")
        return BackendType[name]
    if isinstance(options, TensorWireRpcBackendOptions):
        return BackendType[TENSORWIRE]
    if isinstance(options, TensorPipeRpcBackendOptions):
        return BackendType[TENSORPIPE]
    raise TypeError(f"Could not infer backend for options {options!r}")


def store_key(options: RpcBackendOptions) -> bytes:
    """The key that this worker proves to the group's store; empty if it has none."""
    given = b""
    if isinstance(options, TensorWireRpcBackendOptions):
        given = options.settings().group_key
    return given or read_group_key(os.environ)


def _default_name() -> str:
    """Returns TENSORWIRE; on a host with InfiniBand, logs once how to choose torch's TensorPipe."""
    adapters = sorted(path.name for path in _INFINIBAND.glob("*"))
    if adapters and tensorpipe_available():
        _logger.info(
            "the backend is TENSORWIRE, which uses TCP; for InfiniBand (%s) by torch's TensorPipe "
            "set RPC_BACKEND=TENSORPIPE for every worker",
            ", ".join(adapters),
        )
    return TENSORWIRE


def _init_tensorwire(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> Agent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorWireRpcBackendOptions`, but got "
            f"{rpc_backend_options!r}"
        )
    _check_own_devices(name, rpc_backend_options)
    rpc_backend_options = TensorWireRpcBackendOptions.adopted(rpc_backend_options)
    settings = rpc_backend_options.settings()
    if not settings.group_key:
        settings = replace(settings, group_key=read_group_key(os.environ))
    if settings.bind_address is None:
        mine = address_towards(rpc_backend_options.init_method, settings.group_key)
        settings = replace(settings, bind_address=mine)
    return form_group(
        TENSORWIRE,
        store,
        name,
        rank,
        world_size,
        rpc_backend_options,
        TensorWireTransport(settings),
        _check_device_maps,
        group_key=settings.group_key,
        hosts=lambda address: [host for host, _ in TensorWireAddress.decode(address).tcp],
    )


def _init_tensorpipe(
    store: Store,
    name: str,
    rank: int,
    world_size: int | None,
    rpc_backend_options: RpcBackendOptions,
) -> Agent:
    if not isinstance(rpc_backend_options, TensorPipeRpcBackendOptions):
        raise TypeError(
            "`rpc_backend_options` must be a `TensorPipeRpcBackendOptions`, but got "
            f"{rpc_backend_options!r}"
        )
    _check_own_devices(name, rpc_backend_options)
    over_tcp = prefers_tcp(rpc_backend_options.init_method, world_size)
    transport = TensorPipeTransport(rpc_backend_options, over_tcp)
    return form_group(
        TENSORPIPE,
        store,
        name,
        rank,
        world_size,
        rpc_backend_options,
        transport,
        _check_device_maps,
        TensorPipeAgent,
        group_key=None,
        hosts=lambda address: TensorPipeAddress.decode(address).listens_at(),
    )


def _check_own_devices(name: str, options: TensorPipeRpcBackendOptions) -> None:
    own = local_device_info(options.device_maps, options.devices)
    validate_device_maps({name: own}, all_known=False)


def _check_device_maps(records: list[Record]) -> None:
    """Checks the device maps of a static group, or of two members of a dynamic one."""
    validate_device_maps(
        {
            record.name: DeviceInfo.from_json(json.loads(record.address)["devices"])
            for record in records
        },
        all_known=records[0].world_size is not None,
    )
