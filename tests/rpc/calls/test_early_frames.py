"""``rpc.calls.early_frames``."""

from __future__ import annotations

from rpc.calls.early_frames import EarlyFrames
from rpc.ids import Life
from rpc.transports.base import Frame, FrameKind

ALICE, BOB = Life(1, 0), Life(2, 0)


def _frame(number: int) -> Frame:
    return Frame(FrameKind.REQUEST, number, b"")


def _no_loss(life: Life, reason: str) -> None:
    raise AssertionError


def test_frames_wait_until_the_group_is_known_and_keep_their_order() -> None:
    delivered: list[tuple[Life, Frame]] = []
    early = EarlyFrames(lambda sender, frame: delivered.append((sender, frame)), _no_loss)
    with early.held_back():
        assert early.keep(ALICE, _frame(1))
        assert early.keep(BOB, _frame(2))
        assert delivered == []
    assert delivered == [(ALICE, _frame(1)), (BOB, _frame(2))]


def test_nothing_waits_before_or_after() -> None:
    early = EarlyFrames(lambda sender, frame: None, _no_loss)
    for _ in range(2):
        assert not early.keep(ALICE, _frame(1))
        assert not early.keep_loss(ALICE, "its process ended")
        with early.held_back():
            pass


def test_a_loss_waits_its_turn() -> None:
    taken: list[object] = []
    early = EarlyFrames(
        lambda sender, frame: taken.append(frame.correlation),
        lambda life, reason: taken.append((life, reason)),
    )
    with early.held_back():
        assert early.keep(ALICE, _frame(1))
        assert early.keep_loss(ALICE, "its process ended")
        assert early.keep(BOB, _frame(2))
        assert taken == []
    assert taken == [1, (ALICE, "its process ended"), 2]


def test_what_arrives_during_the_delivery_of_early_frames_comes_after_them() -> None:
    delivered: list[int] = []

    def deliver(sender: Life, frame: Frame) -> None:
        delivered.append(frame.correlation)
        if frame.correlation == 1:
            assert early.keep(ALICE, _frame(2))

    early = EarlyFrames(deliver, _no_loss)
    with early.held_back():
        early.keep(ALICE, _frame(1))
    assert delivered == [1, 2]
