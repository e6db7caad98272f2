"""Records the torch operators of this process while a trace asks for them.

Uses ``torch.profiler``, of which a process can run only one: while the program
runs its own, nothing is recorded here.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from rpc.clock import Clock
from rpc.trace_records import OperatorRecord

_OUR_OWN = ("rpc_", "to_here#")


class OperatorRecorder:
    """One recording, of all threads of the process.

    Args:
        clock: the operators' times will be on it.
    """

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now()
        self._unix_nanoseconds = time.time_ns()
        self._profile: Any = None
        if not profiler._is_profiler_enabled:
            self._profile = profile(
                activities=_activities(),
                experimental_config=torch._C._profiler._ExperimentalConfig(
                    profile_all_threads=True
                ),
            )
            self._profile.start()

    def stop(self) -> list[OperatorRecord]:
        """Ends the recording; what was recorded."""
        if self._profile is None:
            return []
        self._profile.stop()
        results = self._profile.profiler.kineto_results
        if results is None:
            return []
        return [self._record(e) for e in results.events() if not e.name().startswith(_OUR_OWN)]

    def _record(self, event: Any) -> OperatorRecord:
        began = self._now + (event.start_ns() - self._unix_nanoseconds) / 1e9
        device = ""
        if event.device_type() != torch._C._autograd.DeviceType.CPU:
            device = f"GPU {event.device_index()} stream {event.device_resource_id()}"
        thread = 0 if device else event.device_resource_id()
        return OperatorRecord(
            event.name(), thread, began, began + event.duration_ns() / 1e9, device
        )


def _activities() -> list[ProfilerActivity]:
    found = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        found.append(ProfilerActivity.CUDA)
    return found
