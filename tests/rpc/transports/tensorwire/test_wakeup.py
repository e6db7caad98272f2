"""An event that wakes a thread in epoll."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from rpc.transports.tensorwire.wakeup import WakeUp


@pytest.fixture
def wake_up() -> Iterator[WakeUp]:
    made = WakeUp()
    yield made
    made.close()


def _rings(wake_up: WakeUp) -> bool:
    return bool(select.select([wake_up.descriptor], [], [], 0)[0])


def test_it_wakes_until_it_is_cleared(wake_up: WakeUp) -> None:
    assert not _rings(wake_up)
    wake_up.set()
    wake_up.set()
    assert _rings(wake_up)
    wake_up.clear()
    assert not _rings(wake_up)


def test_it_may_be_cleared_again(wake_up: WakeUp) -> None:
    wake_up.clear()
    assert not _rings(wake_up)


def test_once_closed_it_does_not_reach_what_has_its_number_now() -> None:
    reading, writing = os.pipe()
    wake_up = WakeUp()
    wake_up.close()
    try:
        os.dup2(writing, wake_up.descriptor)
        wake_up.set()
        wake_up.clear()
        assert not select.select([reading], [], [], 0)[0]
    finally:
        for descriptor in (reading, writing, wake_up.descriptor):
            os.close(descriptor)
