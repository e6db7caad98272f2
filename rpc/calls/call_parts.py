"""Holds what the parts of a worker's calls share; the agent, which owns all of it, fills it in."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass

from rpc.calls.control_channel import ControlChannel
from rpc.calls.early_frames import EarlyFrames
from rpc.calls.extension_set import ExtensionSet
from rpc.group.members import Group
from rpc.group.shutdown import GroupShutdown
from rpc.ids import Life
from rpc.outcomes.completions import Completions
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.runtime.clock import Clock
from rpc.runtime.deadlines import Timeouts
from rpc.runtime.timers import Timers
from rpc.transports.base import Transport
from rpc.worker_info import WorkerInfo


@dataclass(slots=True, kw_only=True)
class CallParts:
    """The objects that callers and callees of one worker use together.

    Args:
        me: the worker.
        group: the workers that it knows.
        clock: its time.
        timeouts: how long its calls may take.
        transport: carries frames; another one takes its place in a forked child.
        host_moves: see ``transports.base.MapsDevices``.
        control: sends control messages.
        references: keeps its references.
        extensions: attach data to calls.
        completions: runs what may take long, such as callbacks.
        timers: runs what is due later.
        shutdown: told when something ended that a graceful shutdown may be waiting for.
        early: keeps what comes while the group is being made known.
        refused: told of a life from which something came, as it is over or not known.
    """

    me: WorkerInfo
    group: Group
    clock: Clock
    timeouts: Timeouts
    transport: Transport
    host_moves: Set[tuple[int, bool]]
    control: ControlChannel
    references: ReferenceKeeper
    extensions: ExtensionSet
    completions: Completions
    timers: Timers
    shutdown: GroupShutdown
    early: EarlyFrames
    refused: Callable[[Life], None]
