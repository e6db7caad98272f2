"""Processes that freeze, die, hold the interpreter lock and come back, over both backends."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rpc import WorkerLeftError, WorkerLostError
from tests import waiting
from tests.rpc.worker_processes import WorkerProcess, call, join, leave, names, served

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("process_server"), pytest.mark.timeout(400)]

BOUND = 1.0
SECONDS_TO_ACT = 60.0
USUAL_KILLS = 3


def hold_the_interpreter(seconds: int) -> int:
    """Sleeps in C without letting go of the interpreter lock."""
    ctypes.PyDLL(None).sleep(seconds)
    return os.getpid()


def rests() -> int:
    """Counts how often the threads of this process have begun to wait for something so far."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        total += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total


until = partial(waiting.until, seconds=SECONDS_TO_ACT, pause=0.05)


@pytest.mark.parametrize("backend", ["TENSORWIRE", "TENSORPIPE"])
class TestAGroupThatWatches:
    @pytest.fixture
    def workers(self, backend: str, tmp_path: Path) -> Iterator[list[WorkerProcess]]:
        """Alice, bob and carol; alice watches bob, bob carol, and carol alice."""
        made = [WorkerProcess() for _ in range(3)]
        try:
            for rank, worker in enumerate(made):
                self.let_join(worker, backend, tmp_path, rank)
            for worker in made:
                until(lambda worker=worker: worker.do(names) == ["alice", "bob", "carol"])  # type: ignore[misc]
            yield made
        finally:
            for worker in made:
                worker.end()

    @staticmethod
    def let_join(worker: WorkerProcess, backend: str, path: Path, rank: int) -> None:
        url = f"file://{path}/store"
        name = ("alice", "bob", "carol", "dave")[rank]
        worker.do(join, backend, url, name, rank, liveness_timeout=BOUND, rpc_timeout=0)

    def test_frozen_is_lost_busy_is_not_and_the_lost_may_return(
        self, workers: list[WorkerProcess], backend: str, tmp_path: Path
    ) -> None:
        alice, bob, carol = workers

        pid = bob.process.pid
        alice.begin(call, "bob", time.sleep, 3600)
        until(lambda: bob.do(served) == 1)
        bob.send_signal(signal.SIGSTOP)
        with pytest.raises(WorkerLostError, match="no sign of life") as lost:
            alice.result()
        assert lost.value.name == "bob"
        until(lambda: carol.do(names) == ["alice", "carol"])

        bob.send_signal(signal.SIGCONT)
        until(lambda: bob.do(names) == ["bob"])
        with pytest.raises(WorkerLostError, match="declared it lost") as expelled:
            bob.do(call, "carol", os.getpid)
        assert expelled.value.name == "bob"

        bob.do(leave)
        self.let_join(bob, backend, tmp_path, 1)
        until(lambda: alice.do(names) == ["alice", "bob", "carol"])
        assert alice.do(call, "bob", os.getpid) == pid
        assert bob.do(call, "carol", os.getpid) == carol.process.pid

        carol.begin(call, "alice", time.sleep, 3600)
        alice.begin(call, "carol", time.sleep, 3600)
        until(lambda: [bob.do(call, name, served) for name in ("alice", "carol")] == [2, 2])
        carol.send_signal(signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            alice.result()
        until(lambda: bob.do(names) == ["alice", "bob"])
        bob.do(leave)
        self.let_join(bob, backend, tmp_path, 3)  # whoever is gone is not waited for, without limit
        with pytest.raises(WorkerLeftError, match=r"'bob'.* it left the group at"):
            bob.do(call, "bob", os.getpid)
        with pytest.raises(WorkerLostError, match=r"'carol' .* was lost"):
            bob.do(call, "carol", os.getpid)
        bob.do(leave)
        alice.do(leave)

    @pytest.mark.kills
    def test_with_usual_settings_15_s_of_work_are_no_silence_and_4_s_of_it_are_enough(
        self, request: pytest.FixtureRequest, backend: str, tmp_path: Path
    ) -> None:
        """Under ``make kills``; else five times as fast."""
        is_long = request.config.getoption("--kills") > USUAL_KILLS
        bound, held = (5.0, 15) if is_long else (BOUND, 3)
        alice, bob = made = [WorkerProcess() for _ in range(2)]
        try:
            url = f"file://{tmp_path}/usual"
            for rank, worker in enumerate(made):
                name = ("alice", "bob")[rank]
                worker.do(join, backend, url, name, rank, liveness_timeout=bound, rpc_timeout=0)
            assert alice.do(call, "bob", hold_the_interpreter, held) == bob.process.pid
            assert alice.do(names) == ["alice", "bob"]
            alice.begin(call, "bob", time.sleep, 3600)
            until(lambda: bob.do(served) == 1)
            bob.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(WorkerLostError, match="no sign of life"):
                alice.result()
            assert not is_long or time.monotonic() - stopped < 4.1  # and to be told of it here
        finally:
            for worker in made:
                worker.end()

    def test_an_idle_worker_rarely_wakes_up(self, workers: list[WorkerProcess]) -> None:
        """It looks at the group's list, and at its neighbour's answers, five times a second."""
        before, began = [worker.do(rests) for worker in workers], time.monotonic()
        time.sleep(2)
        after, took = [worker.do(rests) for worker in workers], time.monotonic() - began
        assert all(late - early < 60 * took for early, late in zip(before, after, strict=True)), (
            before,
            after,
        )
