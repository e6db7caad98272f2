"""Short time slices for threads that poll, where the system grants them."""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Iterator

import pytest

from rpc.transports.tensorpipe import scheduling

SECONDS = 20


@pytest.fixture
def thread() -> Iterator[int]:
    """A thread that sleeps."""
    end = threading.Event()
    sleeper = threading.Thread(target=end.wait)
    sleeper.start()
    assert sleeper.native_id is not None
    yield sleeper.native_id
    end.set()
    sleeper.join(SECONDS)


def test_a_thread_gets_shorter_time_slices_and_stays_as_nice_as_it_was(thread: int) -> None:
    os.setpriority(os.PRIO_PROCESS, thread, 7)
    others = scheduling.slice_seconds(threading.get_native_id())
    scheduling.shorten_slice(thread, 0.5e-3)
    assert os.getpriority(os.PRIO_PROCESS, thread) == 7
    assert scheduling.slice_seconds(threading.get_native_id()) == others
    if not others:
        pytest.skip("this kernel is older than 6.12 and knows no time slices of a thread's own")
    assert scheduling.slice_seconds(thread) == 0.5e-3


def test_one_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OSError, match="No such process"):
        scheduling.shorten_slice(1 << 22)


def test_a_machine_whose_calls_are_not_known_is_named(
    thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    with pytest.raises(OSError, match="sparc"):
        scheduling.shorten_slice(thread)


def test_one_with_a_schedule_of_its_own_keeps_it(
    thread: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        scheduling, "_get", lambda _: (48, 6, 0, 0, 0, 10, 20, 30)
    )  # SCHED_DEADLINE
    monkeypatch.setattr(scheduling, "_call", lambda *_: pytest.fail("it was changed"))
    scheduling.shorten_slice(thread)


def test_a_refusal_is_logged(
    thread: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: int) -> None:
        raise PermissionError("not here")

    monkeypatch.setattr(scheduling, "reactors", lambda: [thread])
    monkeypatch.setattr(scheduling, "shorten_slice", refuse)
    with caplog.at_level(logging.DEBUG, "rpc"):
        scheduling.shorten_reactors()
    assert caplog.messages == [
        f"thread {thread}, which polls without a pause, keeps its slice: not here"
    ]
