"""Recording torch's operators on the worker's own clock."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from rpc.observe.trace_operators import OperatorRecorder
from rpc.runtime.clock import MonotonicClock
from tests.torch_features import needs_profiles_of_all_threads


@needs_profiles_of_all_threads
def test_operators_of_all_threads_are_recorded_at_their_time() -> None:
    recorder = OperatorRecorder(MonotonicClock())
    times = [time.monotonic()]
    torch.ones(3).mul(2)
    times.append(time.monotonic())
    thread = threading.Thread(target=lambda: torch.ones(3).sub(1))
    thread.start()
    thread.join()
    found = {record.name: record for record in recorder.stop()}
    tolerance = 1e-3
    assert times[0] - tolerance < found["aten::mul"].began < found["aten::mul"].ended
    assert found["aten::mul"].ended < times[1] + tolerance
    assert found["aten::sub"].thread == thread.native_id
    assert found["aten::mul"].thread == threading.get_native_id()
    assert found["aten::mul"].device == ""


@needs_profiles_of_all_threads
def test_our_own_marks_are_not_shown() -> None:
    assert OperatorRecorder(MonotonicClock()).stop() == []


def test_a_running_profiler_keeps_its_operators() -> None:
    with torch.profiler.profile() as profile:
        recorder = OperatorRecorder(MonotonicClock())
        torch.ones(1)
        assert recorder.stop() == []
    assert "aten::ones" in {event.name for event in profile.events()}


@needs_profiles_of_all_threads
def test_a_profiler_that_takes_over_ends_the_recording() -> None:
    recorder = OperatorRecorder(MonotonicClock())
    with torch.profiler.profile():
        torch.ones(1)
    assert recorder.stop() == []


@needs_profiles_of_all_threads
def test_so_it_does_where_torch_then_cannot_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = OperatorRecorder(MonotonicClock())
    end = recorder._profile.stop

    def refuse() -> None:
        end()
        raise RuntimeError("Can't disable Kineto profiler when it's not running")

    monkeypatch.setattr(recorder._profile, "stop", refuse)
    assert recorder.stop() == []
