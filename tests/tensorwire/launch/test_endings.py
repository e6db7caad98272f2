"""Signals reach the launcher and its servers at once; how a worker ended is told as it was."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tensorwire.launch.jobs import FORKED, PROGRAMS, SECONDS, Job, is_running, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
]

ENDS = str(PROGRAMS / "ends.py")


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


def pid_of(work: Job, name: str) -> int:
    path = work.folder / f"{name}.pid"
    until(lambda: path.exists() and bool(path.read_text()), SECONDS, 0.02)
    return int(path.read_text())


def signal_another_thread(process: int) -> None:
    """Sends SIGTERM to a thread of a process, not to its main one, as the kernel may choose."""

    def others() -> list[int]:
        return [t for t in map(int, os.listdir(f"/proc/{process}/task")) if t != process]

    until(lambda: bool(others()), SECONDS)
    assert ctypes.CDLL(None).tgkill(process, others()[0], signal.SIGTERM) == 0


def test_a_server_and_the_launcher_hear_of_a_signal_to_another_thread(
    work: Job, full_length: bool, record_property: Callable[[str, Any], None]
) -> None:
    agent = work.start(
        *("--standalone", "--role", "ps:1,service,max_restarts=1", "--role", "trainer:1"),
        *(*FORKED, ENDS, str(work.folder)),
    )
    server, trainer = pid_of(work, "ps:0"), pid_of(work, "trainer:0")
    began = time.monotonic()
    signal_another_thread(server)
    until(lambda: not is_running(server), SECONDS, 0.01)
    took = time.monotonic() - began
    record_property("seconds until the server has ended", took)
    assert not full_length or took < 1

    assert agent.process.pid is not None
    signal_another_thread(agent.process.pid)
    assert agent.wait() == 128 + signal.SIGTERM
    assert not is_running(trainer)


def test_a_worker_that_its_group_misses_as_it_ends_is_reported_with_its_own_end(work: Job) -> None:
    agent = work.start("--standalone", "--role", "trainer:2", ENDS, str(work.folder))
    assert agent.wait() == 1
    assert "trainer:1 (id 1, process " in agent.said
    assert "failed first, with exit code 1" in agent.said
    assert "SIGKILL" not in agent.said
