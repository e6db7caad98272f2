"""Large copies: every byte, whoever copies it, and nobody else's memory afterwards."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from rpc.transports.host import copying
from rpc.transports.host import helpers as host_helpers
from rpc.transports.host.copying import CopyThreads
from rpc.transports.host.segments import Budget, SendPool

MIB = 1 << 20
SECONDS = 20
Move = Callable[[int, int, int], object]


@contextmanager
def threads(helpers: int | None = None) -> Iterator[CopyThreads]:
    made = CopyThreads("test", helpers)
    try:
        yield made
    finally:
        made.close()
    assert not helpers_alive()


def helpers_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test-copy")]


def copies(copier: CopyThreads, length: int) -> bool:
    """Copies noise between two places that are not aligned; True if that is all it did."""
    source = np.random.default_rng(length).integers(1, 255, length + 3, np.uint8)
    target = np.zeros(length + 11, np.uint8)
    copier.copy(target.ctypes.data + 5, source.ctypes.data + 3, length)
    around = np.concatenate([target[:5], target[5 + length :]])
    return bool((target[5 : 5 + length] == source[3:]).all()) and not around.any()


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Lists who copied how many bytes."""
    made: list[tuple[str, int]] = []

    def move(target: int, source: int, length: int) -> None:
        made.append((threading.current_thread().name, length))
        ctypes.memmove(target, source, length)

    replace_memmove(monkeypatch, move)
    return made


def replace_memmove(monkeypatch: pytest.MonkeyPatch, move: Move) -> None:
    monkeypatch.setattr(copying, "memmove", move)


@pytest.mark.parametrize("helpers", [0, 1, 3])
@pytest.mark.parametrize("length", [0, 1, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 33 * MIB + 4097])
def test_every_byte_is_copied_once(helpers: int, length: int, moves: list[tuple[str, int]]) -> None:
    with threads(helpers) as copier:
        assert copies(copier, length)
    assert sum(size for _, size in moves) == length


def test_helpers_start_with_the_first_large_copy_and_end_with_the_threads() -> None:
    with threads(2) as copier:
        copies(copier, 8 * MIB - 1)
        assert helpers_alive() == []
        for _ in range(3):
            copies(copier, 8 * MIB)
        assert helpers_alive() == ["test-copy-0", "test-copy-1"]


def test_a_helper_copies_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2, timeout=SECONDS)

    def move(target: int, source: int, length: int) -> None:
        both.wait()
        ctypes.memmove(target, source, length)

    replace_memmove(monkeypatch, move)
    with threads(1) as copier:
        assert copies(copier, 9 * MIB)


def test_who_copies_does_it_all_while_helpers_are_busy(
    monkeypatch: pytest.MonkeyPatch, moves: list[tuple[str, int]]
) -> None:
    move = copying.memmove
    begun, released = threading.Event(), threading.Event()

    def move_or_hang(target: int, source: int, length: int) -> None:
        if threading.current_thread().name == "test-copy-0":
            begun.set()
            assert released.wait(SECONDS)
        assert begun.wait(SECONDS)
        move(target, source, length)

    replace_memmove(monkeypatch, move_or_hang)
    with threads(1) as copier:
        first = threading.Thread(target=copies, args=(copier, 8 * MIB))
        first.start()
        assert begun.wait(SECONDS)
        assert copies(copier, 8 * MIB + 1)
        mine = [size for name, size in moves if name == threading.current_thread().name]
        assert sum(mine) == 8 * MIB + 1
        released.set()
        first.join(SECONDS)


def test_memory_is_the_callers_again_when_a_signal_handler_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    me = threading.current_thread()
    ended: list[str] = []
    begun = threading.Event()

    def move(target: int, source: int, length: int) -> None:
        if threading.current_thread() is me:
            assert begun.wait(SECONDS)
            raise KeyboardInterrupt
        begun.set()
        ctypes.memmove(target, source, length)
        ended.append(threading.current_thread().name)

    replace_memmove(monkeypatch, move)
    with threads(1) as copier:
        with pytest.raises(KeyboardInterrupt):
            copies(copier, 64 * MIB)
        assert ended == ["test-copy-0"]


def test_one_that_cannot_have_threads_copies_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host_helpers.Thread, "start", refuse)
    with threads(3) as copier:
        assert copies(copier, 32 * MIB)


def test_a_closed_one_copies_alone(moves: list[tuple[str, int]]) -> None:
    with threads(2) as copier:
        copies(copier, 16 * MIB)
    moves.clear()
    assert copies(copier, 16 * MIB)
    assert [name for name, _ in moves] == [threading.current_thread().name]


def test_one_that_is_closed_amid_copies_finishes_them() -> None:
    copier = CopyThreads("test", 2)
    results: list[bool] = []
    threads = [
        threading.Thread(target=lambda size=size: results.append(copies(copier, size * MIB)))
        for size in (17, 18, 19, 20)
    ]
    for thread in threads:
        thread.start()
    copier.close()
    for thread in threads:
        thread.join(SECONDS)
    assert results == [True] * 4
    assert helpers_alive() == []


def test_there_is_a_helper_for_each_other_core_up_to_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for cores, helpers in ((1, 0), (2, 1), (4, 3), (64, 3)):
        monkeypatch.setattr(host_helpers, "usable_cores", lambda cores=cores: cores)
        with threads() as copier:
            copies(copier, 64 * MIB)
            assert len(helpers_alive()) == helpers


def test_a_pool_copies_as_it_is_told() -> None:
    told: list[int] = []

    def copy(target: int, source: int, length: int) -> None:
        told.append(length)
        ctypes.memmove(target, source, length)

    pool = SendPool(Budget(64 * MIB), copy, "bob", "sockets")
    offer = pool.offer(5000)
    assert offer is not None
    os.close(offer.descriptor)
    pool.answered(offer.segment, True)
    data = np.ones(5000, np.uint8)
    assert pool.put(data.ctypes.data, data.nbytes) is not None
    assert told == [5000]
    pool.close()
