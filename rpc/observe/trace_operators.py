"""Records the torch operators of this process while a trace asks for them.

Uses ``torch.profiler``, of which a process can run only one: while the program
runs its own, nothing is recorded here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile

from rpc.errors import RpcError
from rpc.observe.trace_records import OperatorRecord
from rpc.runtime.clock import Clock

_OUR_OWN = ("rpc_", "to_here#")
_MARKS = 8


@dataclass(frozen=True, slots=True)
class _Mark:
    """A moment on the worker's clock, known to lie between two readings of it."""

    before: float
    after: float

    @property
    def middle(self) -> float:
        return (self.before + self.after) / 2

    @property
    def width(self) -> float:
        return self.after - self.before


class OperatorRecorder:
    """One recording, of all threads of the process.

    Torch's own account of when things happened may be off by a percent in a short
    recording. So marks are left at both ends, whose times the clock tells as well.

    Args:
        clock: the operators' times will be on it.

    Raises:
        RpcError: this version of torch cannot do it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._marks: dict[str, _Mark] = {}
        self._profile: Any = None
        if not profiler._is_profiler_enabled:
            self._profile = profile(activities=_activities(), experimental_config=_of_all_threads())
            self._profile.start()
            self._mark("rpc_begin#")

    def stop(self) -> list[OperatorRecord]:
        """Ends the recording; what was recorded."""
        if self._profile is None:
            return []
        self._mark("rpc_end#")
        try:
            self._profile.stop()
        except RuntimeError:  # of some releases of torch, where another profiler has ended it
            return []
        results = self._profile.profiler.kineto_results
        events = results.events() if results is not None else []
        marked = {e.name(): e.start_ns() for e in events if e.name() in self._marks}
        if len(marked) < len(self._marks):  # another profiler took the recording over
            return []
        seconds = self._scale(marked)
        return [_record(e, seconds) for e in events if not e.name().startswith(_OUR_OWN)]

    def _mark(self, prefix: str) -> None:
        for number in range(_MARKS):
            before = self._clock.now()
            with profiler.record_function(f"{prefix}{number}"):
                after = self._clock.now()
            self._marks[f"{prefix}{number}"] = _Mark(before, after)

    def _scale(self, marked: Mapping[str, int]) -> Callable[[int], float]:
        """From the recording's nanoseconds to the clock's seconds, by the best mark of each end."""

        def best(prefix: str) -> tuple[float, int]:
            names = [name for name in marked if name.startswith(prefix)]
            name = min(names, key=lambda name: self._marks[name].width)
            return self._marks[name].middle, marked[name]

        (begin, first), (end, last) = best("rpc_begin#"), best("rpc_end#")
        pace = (end - begin) / max(last - first, 1)
        return lambda nanoseconds: begin + (nanoseconds - first) * pace


def _record(event: Any, seconds: Callable[[int], float]) -> OperatorRecord:
    start, end = event.start_ns(), event.start_ns() + event.duration_ns()
    device = ""
    if event.device_type() != torch._C._autograd.DeviceType.CPU:
        device = f"GPU {event.device_index()} stream {event.device_resource_id()}"
    thread = 0 if device else event.device_resource_id()
    return OperatorRecord(event.name(), thread, seconds(start), seconds(end), device)


def _of_all_threads() -> torch._C._profiler._ExperimentalConfig:
    try:
        return torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        raise RpcError(
            f"torch {torch.__version__} cannot record the operators of all threads; "
            "trace without operators or use a later version"
        ) from None


def _activities() -> list[ProfilerActivity]:
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    return activities
