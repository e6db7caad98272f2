"""Processes that end without a shutdown while their threads are in a store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rpc.runtime.store_visits import ProcessEndsError, Visits
from tests.free_ports import free_port
from tests.programs import run_program

SECONDS = 30.0

_WATCHES_THE_GROUP = """
membership.LOOK_SECONDS = 0.0
rpc.init_rpc("a", rank=0, rpc_backend_options=options)
rpc.rpc_sync("a", abs, (-3,))
"""

_LOOKS_FOR_A_VERDICT = """
watch.Watch.beat = lambda self, now: self._collect() or now
rpc.init_rpc("a", rank=0, world_size=1, rpc_backend_options=options)
rpc.rpc_sync("a", abs, (-3,))
"""

_FOUND_NO_HOST = """
options.bring_up_timeout = 1
try:
    rpc.init_rpc("a", rank=1, world_size=2, rpc_backend_options=options)
except rpc.BringUpError:
    pass
"""


@contextmanager
def visitor(visits: Visits, leaves: threading.Event) -> Iterator[None]:
    """Another thread that is there until ``leaves``."""
    is_there = threading.Event()

    def visit() -> None:
        with visits.one():
            is_there.set()
            leaves.wait(SECONDS)

    thread = threading.Thread(target=visit)
    thread.start()
    assert is_there.wait(SECONDS)
    yield
    leaves.set()
    thread.join()


def test_the_end_waits_for_who_is_there_and_for_nobody_who_has_left() -> None:
    visits, leaves = Visits(), threading.Event()
    with visits.one():
        pass
    with visitor(visits, leaves):
        ending = threading.Thread(target=visits.end, args=(SECONDS,))
        ending.start()
        ending.join(0.1)
        assert ending.is_alive()
        leaves.set()
        ending.join(SECONDS)
        assert not ending.is_alive()


def test_the_end_does_not_wait_for_ever() -> None:
    visits = Visits()
    with visitor(visits, threading.Event()):
        begin = time.monotonic()
        visits.end(0.1)
        assert time.monotonic() - begin < SECONDS / 2


def test_the_end_waits_for_who_was_left_behind_however_long_ago() -> None:
    visits, leaves = Visits(), threading.Event()
    gone, stays = threading.Thread(target=int), threading.Thread(target=leaves.wait)
    for thread in (gone, stays):
        thread.start()
        visits.left_behind(thread)
    gone.join()
    begin = time.monotonic()
    visits.end(0.1)  # which does not wait for ever either
    assert 0.1 <= time.monotonic() - begin < SECONDS / 2
    leaves.set()
    visits.end(SECONDS)
    assert not stays.is_alive()


def test_nobody_is_admitted_after_the_end() -> None:
    visits = Visits()
    visits.end()
    with pytest.raises(ProcessEndsError), visits.one():
        pytest.fail("it was admitted")
    visits.end(SECONDS)  # who was refused is not there


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize("busy", [_WATCHES_THE_GROUP, _LOOKS_FOR_A_VERDICT, _FOUND_NO_HOST])
@pytest.mark.parametrize(
    ("backend", "last_line", "status", "last_words"),
    [
        ("TensorWire", "raise ValueError('its own')", 1, "ValueError: its own"),
        ("TensorPipe", "sys.exit(3)", 3, ""),
    ],
)
def test_a_process_ends_with_its_own_status_without_a_shutdown(
    backend: str, busy: str, last_line: str, status: int, last_words: str, tmp_path: Path
) -> None:
    program = (
        "import sys, time, rpc\n"
        "from rpc.group import membership, watch\n"
        f"url = 'tcp://127.0.0.1:{free_port()}'\n"
        f"options = rpc.{backend}RpcBackendOptions(init_method=url)\n"
        f"{busy}\n{last_line}\n"
    )
    ended = run_program(tmp_path, program)
    words = ended.stderr.splitlines()
    assert (ended.returncode, words[-1] if words else "") == (status, last_words), ended.stderr
