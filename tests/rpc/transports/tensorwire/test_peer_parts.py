"""Only threads on which nobody depends may wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rpc.options import WhenFull
from rpc.transports.tensorwire.peer_parts import PeerParts


def shared(told: list[str], *, reading: bool, moving: bool) -> PeerParts:
    unused: Any = None
    sides: Any = SimpleNamespace(
        is_reading_here=lambda: reading,
        is_moving_here=lambda: moving,
        about_to_block=lambda: told.append("requests"),
        flush_held=lambda: told.append("held"),
        attend=lambda: told.append("replies"),
    )
    return PeerParts(
        unused, sides, sides, sides, unused, 0.0, 1, WhenFull.BLOCK, 1.0, unused, unused
    )


def test_a_thread_that_may_wait_lets_others_read_first() -> None:
    told: list[str] = []
    assert shared(told, reading=False, moving=False).may_wait()
    assert told == ["requests", "held", "replies"]


@pytest.mark.parametrize("reads", ["replies", "bulk"])
def test_a_thread_on_whose_reading_others_depend_may_not_wait(reads: str) -> None:
    told: list[str] = []
    assert not shared(told, reading=reads == "replies", moving=reads == "bulk").may_wait()
    assert told == []
