"""Threads can be started where Python itself starts none any more, and tell where they are."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpc.runtime.threads import Thread, running_stacks
from tests.programs import run_program
from tests.waiting import until

SECONDS = 20.0

# Later releases refuse only when no Python code can run, and keep their threads otherwise.
needs_the_way_round = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="no refusal to go round in this Python"
)


@pytest.fixture
def refusal(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Python starts no thread, in the words of the parameter."""

    def refuse(*_: Any) -> None:
        raise RuntimeError(request.param)

    monkeypatch.setattr(threading, "_start_new_thread", refuse)


ends = pytest.mark.parametrize(
    "refusal", ["can't create new thread at interpreter shutdown"], indirect=True
)


@needs_the_way_round
@ends
@pytest.mark.usefixtures("refusal")
def test_a_thread_starts_and_ends_as_others_do_although_the_interpreter_is_ending() -> None:
    go_on = threading.Event()
    seen: list[threading.Thread] = []

    def work(word: str) -> None:
        assert word == "hello"
        seen.append(threading.current_thread())
        go_on.wait(SECONDS)

    thread = Thread(target=work, args=("hello",), name="late", daemon=True)
    thread.start()
    assert thread.is_alive()
    assert thread in threading.enumerate()
    go_on.set()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert seen == [thread]
    assert thread not in threading.enumerate()
    with pytest.raises(RuntimeError, match="only be started once"):
        thread.start()


@needs_the_way_round
@ends
@pytest.mark.usefixtures("refusal")
def test_what_the_operating_system_refuses_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    system = SimpleNamespace(pthread_create=lambda *_: errno.EAGAIN)
    monkeypatch.setattr(ctypes, "CDLL", lambda _: system)
    before = threading.enumerate()
    with pytest.raises(RuntimeError, match="can't start new thread: Resource temporarily"):
        Thread(target=pytest.fail).start()
    assert threading.enumerate() == before


@needs_the_way_round
@pytest.mark.parametrize("refusal", ["can't start new thread"], indirect=True)
@pytest.mark.usefixtures("refusal")
def test_other_refusals_are_raised() -> None:
    with pytest.raises(RuntimeError, match=r"^can't start new thread$"):
        Thread(target=pytest.fail).start()


@needs_the_way_round
@ends
@pytest.mark.usefixtures("refusal")
def test_no_thread_starts_once_no_python_code_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
        Thread(target=pytest.fail).start()


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize("backend", ["TensorPipe", "TensorWire"])
def test_a_programs_exit_hooks_may_call_and_shut_down(backend: str, tmp_path: Path) -> None:
    program = (
        "import atexit, rpc\n"
        "atexit.register(rpc.shutdown)\n"
        "atexit.register(lambda: print(rpc.rpc_sync('a', abs, (-3,), timeout=20)))\n"
        f"meet = rpc.{backend}RpcBackendOptions(init_method='file://{tmp_path}/store')\n"
        "rpc.init_rpc('a', rank=0, world_size=1, rpc_backend_options=meet)\n"
    )
    ended = run_program(tmp_path, program)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "3\n", "")


def wait_for_größe(gate: threading.Event) -> None:
    gate.wait(SECONDS)


def test_what_a_thread_is_in_is_told_innermost_first_with_its_lines() -> None:
    gate = threading.Event()
    other = threading.Thread(target=wait_for_größe, args=(gate,))
    other.start()
    try:
        until(lambda: "wait" in [at.function for at in running_stacks()[other.ident or 0]])
        stack = running_stacks()[other.ident or 0]
    finally:
        gate.set()
        other.join()
    functions = [at.function for at in stack]
    assert functions[-2:] == ["_bootstrap_inner", "_bootstrap"]
    ours = stack[functions.index("wait_for_größe")]
    assert (ours.file, ours.line) == (__file__, wait_for_größe.__code__.co_firstlineno + 1)
    assert functions[0] == "wait"
    assert other.ident not in running_stacks()


def test_of_more_threads_than_python_tells_of_the_older_ones_are_told_by_one_function() -> None:
    gate = threading.Event()
    others = [threading.Thread(target=gate.wait, args=(SECONDS,)) for _ in range(110)]
    for other in others:
        other.start()
    try:
        stacks = running_stacks()
    finally:
        gate.set()
        for other in others:
            other.join()
    assert {other.ident for other in others} <= stacks.keys()
    assert threading.main_thread().ident in stacks


def test_stacks_are_right_while_threads_run_on() -> None:
    stop = threading.Event()

    def numbers() -> Iterator[int]:
        yield from range(3)

    def fail(depth: int) -> None:
        if not depth:
            raise ValueError("at the bottom")
        for _ in numbers():
            fail(depth - 1)

    def run() -> None:
        while not stop.is_set():
            with contextlib.suppress(ValueError):
                fail(8)

    others = [threading.Thread(target=run) for _ in range(3)]
    for other in others:
        other.start()
    try:
        stacks = [running_stacks()[other.ident or 0] for _ in range(20) for other in others]
    finally:
        stop.set()
        for other in others:
            other.join()
    for stack in stacks:
        assert [at.function for at in stack][-1] == "_bootstrap"
        depths = [at.function for at in stack].count("fail")
        assert depths <= 9
