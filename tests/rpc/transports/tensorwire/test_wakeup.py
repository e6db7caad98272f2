"""The bell that wakes whoever polls."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from rpc.transports.tensorwire.wakeup import Bell


@pytest.fixture
def bell() -> Iterator[Bell]:
    made = Bell()
    yield made
    made.close()


def _rings(bell: Bell) -> bool:
    return bool(select.select([bell.descriptor], [], [], 0)[0])


def test_a_bell_rings_until_it_is_silenced(bell: Bell) -> None:
    assert not _rings(bell)
    bell.ring()
    bell.ring()
    assert _rings(bell)
    bell.silence()
    assert not _rings(bell)


def test_a_silent_bell_may_be_silenced(bell: Bell) -> None:
    bell.silence()
    assert not _rings(bell)


def test_a_closed_bell_does_not_reach_what_has_its_number_now() -> None:
    reading, writing = os.pipe()
    bell = Bell()
    bell.close()
    try:
        os.dup2(writing, bell.descriptor)
        bell.ring()
        bell.silence()
        assert not select.select([reading], [], [], 0)[0]
    finally:
        for descriptor in (reading, writing, bell.descriptor):
            os.close(descriptor)
