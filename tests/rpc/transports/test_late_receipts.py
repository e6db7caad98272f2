"""Acknowledgements leave before long, also after something went wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rpc.transports.late_receipts import LateReceipts

SECONDS = 10.0


class Channel:
    def __init__(self, error: Exception | None = None) -> None:
        self.told = threading.Event()
        self._error = error

    def acknowledge(self) -> None:
        self.told.set()
        if self._error is not None:
            raise self._error


@pytest.fixture
def receipts() -> Iterator[LateReceipts]:
    receipts = LateReceipts("receipts", delay=0.0)
    yield receipts
    receipts.close()


def test_one_that_cannot_be_told_keeps_nobody_from_it(
    receipts: LateReceipts, caplog: pytest.LogCaptureFixture
) -> None:
    broken, whole = Channel(OSError("no buffers")), Channel()
    receipts.add(broken)
    assert broken.told.wait(SECONDS)
    receipts.add(whole)
    assert whole.told.wait(SECONDS)
    assert "no buffers" in caplog.text


def test_without_a_thread_what_is_owed_waits_for_the_next(
    receipts: LateReceipts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first, second = Channel(), Channel()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        receipts.add(first)
    receipts.add(second)
    assert first.told.wait(SECONDS)
    assert second.told.wait(SECONDS)


def test_it_closes_although_its_thread_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    receipts = LateReceipts("receipts")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        receipts.add(Channel())
    receipts.close()
