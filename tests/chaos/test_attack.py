"""The job that is attacked, for a short while, and what judges it."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from chaos.attack import judge
from chaos.attack.__main__ import run
from chaos.attack.job import Job, Observed, Settings
from chaos.attack.judge import undisturbed, violations
from chaos.attack.recording import Recorder
from chaos.attack.surroundings import MARK, Process, doors, processes
from chaos.attack.training import TRAINERS
from tests.waiting import until

_LAST = 5


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.kills(2, usual=0)
def test_a_job_does_not_notice_that_it_is_attacked(tmp_path: Path, kill_seed: int) -> None:
    settings = Settings(tmp_path, 20.0, bool(kill_seed), kill_every=10.0, seed=kill_seed)
    assert run(settings) == []


# --- The judge


@pytest.fixture(scope="module")
def rows() -> list[torch.Tensor]:
    return undisturbed(_LAST)


@pytest.fixture
def ended(
    tmp_path: Path, rows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> tuple[Job, Observed]:
    """A job in which nothing went wrong; the undisturbed run is made once for all tests."""
    others = [each + 1 for each in rows]
    monkeypatch.setattr(judge, "undisturbed", lambda last: rows if last == _LAST else others)
    job = Job(Settings(tmp_path, 1.0, True, 0.0, 0))
    job.output.write_text("rpcrun: ps:1 starts again, as life 2\n")
    for name, found in zip(TRAINERS, rows, strict=True):
        torch.save(found, tmp_path / f"{name}.rows")
        (tmp_path / f"{name}.lost").write_text("ps:1: the connection was closed\n")
    return job, Observed(killed=["ps:1"], peak={"store": 150 << 20}, last=_LAST, code=0)


def test_a_job_that_ends_with_the_same_bits_and_lost_only_who_was_killed_is_right(
    ended: tuple[Job, Observed],
) -> None:
    assert list(violations(*ended)) == []


def _another_bit(job: Job, seen: Observed) -> None:
    path = job.folder / f"{TRAINERS[1]}.rows"
    rows = torch.load(path)
    rows.view(torch.int32)[7, 3] ^= 1
    torch.save(rows, path)


def _another_step(job: Job, seen: Observed) -> None:
    seen.last += 1


def _no_rows(job: Job, seen: Observed) -> None:
    (job.folder / f"{TRAINERS[0]}.rows").unlink()


def _another_end(job: Job, seen: Observed) -> None:
    seen.code = 1


def _nobody_was_killed(job: Job, seen: Observed) -> None:
    seen.killed.clear()


def _a_store_that_grew(job: Job, seen: Observed) -> None:
    seen.peak["store"] = 200 << 20


def _a_store_that_showed(job: Job, seen: Observed) -> None:
    seen.counts["values of ours that torch's store showed"] = 1


def _a_traceback(job: Job, seen: Observed) -> None:
    job.output.write_text("Traceback (most recent call last):\n")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (_another_bit, "the rows are others"),
        (_another_step, "the rows are others"),
        (_no_rows, "there are no rows"),
        (_another_end, "the job ended with 1"),
        (_nobody_was_killed, "ps:1 was declared lost 2 times; it was killed 0 times"),
        (_a_store_that_grew, "took 200 MiB, more than 200"),
        (_a_store_that_showed, "showed 1 values of ours"),
        (_a_traceback, "it printed: Traceback"),
    ],
)
def test_what_must_not_be_is_named(
    spoil: Callable[[Job, Observed], None], said: str, ended: tuple[Job, Observed]
) -> None:
    spoil(*ended)
    (found,) = violations(*ended)
    assert said in found


# --- Looking


def test_a_jobs_processes_are_known_by_the_mark_and_their_doors_by_their_sockets() -> None:
    mark = f"test-{os.getpid()}"
    child = subprocess.Popen(["sleep", "60"], env=os.environ | {MARK: mark})
    try:
        until(lambda: [each.pid for each in processes(mark)] == [child.pid])
    finally:
        child.kill()
        child.wait()
    with closing(socket.create_server(("127.0.0.1", 0))) as tcp, closing(_datagrams()) as udp:
        found = doors([Process(os.getpid(), "worker", 0, 0)])
        assert tcp.getsockname()[1] in found.tcp
        assert udp.getsockname()[1] in found.udp


def _datagrams() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("127.0.0.1", 0))
    return made


def test_what_is_sent_on_the_loopback_interface_is_recorded() -> None:
    """Sent again and again, as the kernel drops what a busy machine does not read in time."""
    recorder = Recorder()
    if not recorder.may:
        pytest.skip("only root may record what others send")
    try:
        with closing(socket.create_server(("127.0.0.1", 0))) as tcp, closing(_datagrams()) as udp:
            port, other = tcp.getsockname()[1], udp.getsockname()[1]

            def send() -> None:
                with closing(socket.create_connection(("127.0.0.1", port))) as client:
                    client.sendall(b"hello")
                tcp.accept()[0].close()
                udp.sendto(b"gram", ("127.0.0.1", other))

            until(lambda: [b"hello"] in recorder.conversations(port), 60, 0.1, send)
            until(lambda: b"gram" in recorder.datagrams(other), 60, 0.1, send)
    finally:
        recorder.close()
