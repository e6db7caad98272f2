"""``rpc.calls.early_frames``."""

from __future__ import annotations

from functools import partial

from rpc.calls.early_frames import EarlyFrames


def _nothing() -> None: ...


def test_what_comes_early_waits_until_the_group_is_known_and_keeps_its_order() -> None:
    delivered: list[str] = []
    early = EarlyFrames()
    with early.held_back():
        for what in ("a frame", "a loss", "another frame"):
            assert early.keep(partial(delivered.append, what))
        assert delivered == []
    assert delivered == ["a frame", "a loss", "another frame"]


def test_nothing_waits_before_or_after() -> None:
    early = EarlyFrames()
    for _ in range(2):
        assert early.held is None
        assert not early.keep(_nothing)
        with early.held_back():
            assert early.held is not None


def test_what_arrives_during_the_delivery_of_what_came_early_comes_after_it() -> None:
    delivered: list[int] = []
    early = EarlyFrames()

    def deliver_first() -> None:
        delivered.append(1)
        assert early.keep(partial(delivered.append, 3))

    with early.held_back():
        assert early.keep(deliver_first)
        assert early.keep(partial(delivered.append, 2))
    assert delivered == [1, 2, 3]
    assert not early.keep(_nothing)
