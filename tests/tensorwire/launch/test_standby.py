"""Processes that wait to become workers: they become them, are replaced, and never stay behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorwire.launch.becoming import Order
from tensorwire.launch.standby import QUIET_SECONDS, Standbys
from tensorwire.launch.template import NotReadyError
from tests.tensorwire.launch.jobs import LIGHT, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
]

LONG_AGO = -QUIET_SECONDS


@pytest.fixture
def standbys() -> Iterator[Standbys]:
    made = Standbys(2, ("json",), ())
    yield made
    made.close()


def make_ready(standbys: Standbys, count: int) -> None:
    def ready() -> bool:
        standbys.tend(0.0, LONG_AGO)
        return standbys.ready == count

    until(ready, SECONDS, 0.01)


def test_one_that_is_ready_runs_the_program(standbys: Standbys, tmp_path: Path) -> None:
    order = Order({"WHO": "me"}, (str(tmp_path / "says.py"), "1"), str(tmp_path / "said"))
    (tmp_path / "says.py").write_text(
        "import os, sys\nprint(sys.argv[1:], dict(os.environ), 'json' in sys.modules)\nsys.exit(3)"
    )
    with pytest.raises(NotReadyError):
        standbys.start(order)
    make_ready(standbys, 1)
    process = standbys.start(order)
    assert process.wait(SECONDS) == 3
    assert (tmp_path / "said").read_text() == "['1'] {'WHO': 'me'} True\n"
    assert standbys.ready == 0


def test_they_are_begun_one_after_the_other_and_not_while_workers_start(
    standbys: Standbys,
) -> None:
    standbys.tend(0.0, 1 - QUIET_SECONDS)
    assert standbys._standbys == []
    standbys.tend(0.0, LONG_AGO)
    standbys.tend(0.0, LONG_AGO)
    assert len(standbys._standbys) == 1
    make_ready(standbys, 2)
    standbys.tend(0.0, LONG_AGO)
    assert len(standbys._standbys) == 2


def test_one_that_dies_is_replaced_and_one_whose_agent_is_gone_ends() -> None:
    standbys = Standbys(1, (), ())
    make_ready(standbys, 1)
    (first,) = standbys._standbys
    os.kill(first.process.pid, signal.SIGKILL)
    first.process.wait(SECONDS)
    make_ready(standbys, 1)
    (second,) = standbys._standbys
    assert second is not first
    second.socket.close()  # as the kernel does when the agent dies
    assert second.process.wait(SECONDS) == 0
    standbys.close()


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


def test_a_worker_that_is_killed_comes_back_in_a_warm_process(work: Job) -> None:
    agent = work.start(
        *("--standalone", "--role", "trainer:1,max_restarts=1", "--warm", "1"),
        *("--monitor-interval", "0.05", LIGHT, str(work.folder)),
    )
    first = work.life("trainer:0")
    until(lambda: "is ready" in agent.said, SECONDS, 0.05)
    os.kill(first.pid, signal.SIGKILL)
    again = work.life("trainer:0", 2)
    assert f"a warm process ({again.pid}) is ready" in agent.said
    assert again.environment["TORCHELASTIC_RESTART_COUNT"] == "1"
    assert (first.is_warm, again.is_warm) == (False, True)
    work.end()
    assert agent.wait() == 0
