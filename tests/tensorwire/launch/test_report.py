"""The report that people read of a job."""

from __future__ import annotations

import io
import os
import pty
import signal

import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from tensorwire.launch.plan import Failure, Seat
from tensorwire.launch.processes import by_cause, ended_badly
from tensorwire.launch.report import (
    ProgressLine,
    describe_dismissal,
    describe_end,
    describe_exit,
    describe_failure,
    describe_plan,
)
from tensorwire.launch.supervisor import Ended
from tests.tensorwire.launch.plans import Job


def test_exit_codes_are_told_from_signals() -> None:
    assert [describe_exit(code) for code in (1, -9, -11, -99)] == [
        "exit code 1",
        "signal SIGKILL",
        "signal SIGSEGV",
        "signal 99",
    ]


@pytest.mark.parametrize(
    ("code", "asked_by", "told"),
    [
        (-15, signal.SIGTERM, "was stopped"),
        (-15, None, "ended with signal SIGTERM"),
        (-9, signal.SIGTERM, "ended with signal SIGKILL"),
        (1, signal.SIGTERM, "ended with exit code 1"),
    ],
)
def test_a_worker_that_ends_by_the_signal_that_asked_it_to_was_stopped(
    code: int, asked_by: int | None, told: str
) -> None:
    end = ended_badly(Seat("ps", 0, 0), 77, ProcessFailure(0, 77, code, ""), asked_by)
    assert describe_end(end) == told


def test_a_worker_that_was_stopped_is_no_cause_of_what_others_ended_with() -> None:
    stopped = Ended(0, -15, stopped=True)
    assert by_cause([(stopped, None), (Ended(1, 1), None), (Ended(2, -9), None)]) == [
        Ended(2, -9),
        Ended(1, 1),
        stopped,
    ]


def test_the_report_names_the_worker_that_failed_first_and_what_it_said() -> None:
    failure = Failure("trainer:3", "Traceback:\nBoom", 5, "host1", 77, 1, 3)
    assert describe_failure(failure).splitlines() == [
        "the job failed: trainer:3 (id 5, process 77 on host1) failed first, with exit code 1 "
        "after 2 restarts",
        "    Traceback:",
        "    Boom",
    ]
    assert "decorate its main function" in describe_failure(Failure("a:0", "", 0, "h", 1, -9, 1))
    assert describe_dismissal(failure).startswith(
        "this agent is out of the job, which goes on without it: trainer:3 (id 5, process 77 on "
    )
    assert describe_failure(Failure("", "too few agents")) == "the job failed: too few agents"


def test_the_line_counts_workers_by_role_and_state_and_restarts() -> None:
    job = Job("ps:1,service", "trainer:3,max_restarts=2", "ddp:1,pg", nodes=2)
    job.leave(1)
    job.ends("trainer:0")
    job.ends("trainer:1", -9)
    running = {"ps:0", "trainer:2"}
    assert describe_plan(job.plan, lambda seat: seat.name in running) == (
        "ps: 1 running, 1 vacant · trainer: 1 running, 1 starting, 3 vacant, 1 done · "
        "ddp: 1 waiting, 1 vacant · 1 restart"
    )


def test_nothing_is_drawn_where_there_is_no_terminal() -> None:
    text = io.StringIO()
    line = ProgressLine(text)
    line.show("ps: 1 running")
    line.close()
    assert text.getvalue() == ""


def test_a_terminal_keeps_its_last_line_for_the_job_and_gets_it_back(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    try:
        os.set_blocking(ours, False)
        with open(theirs, "w", closefd=False) as terminal:
            monkeypatch.setattr(os, "get_terminal_size", lambda number: (40, 10))
            line = ProgressLine(terminal)
            line.show("ps: 1 running")
            drawn = os.read(ours, 4096).decode()
            line.show("ps: 1 running")  # nothing is new
            line.close()
            after = os.read(ours, 4096).decode()
    finally:
        os.close(ours)
        os.close(theirs)
    assert "\x1b[1;9r" in drawn
    assert "\x1b[10;1H\x1b[2Krpcrun 0 s  ps: 1 running" in drawn
    assert after == "\x1b7\x1b[1;10r\x1b[10;1H\x1b[2K\x1b8"
