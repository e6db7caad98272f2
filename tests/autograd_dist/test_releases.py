"""News of contexts that are over: bundled, and sent until it has gone out."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import pytest

from autograd_dist.releases import Releases
from rpc.errors import QueueFullError
from tests import waiting


def test_news_that_is_refused_goes_out_later_and_keeps_none_from_going_out() -> None:
    refusals = 2
    told: set[tuple[int, int]] = set()

    def send(worker: int, context_ids: Sequence[int]) -> None:
        nonlocal refusals
        if worker == 1 and refusals:
            refusals -= 1
            raise QueueFullError("32 MiB are under way to it")
        told.update((worker, context_id) for context_id in context_ids)

    releases = Releases("test-releases", send)
    try:
        releases.put(7, (1, 2))
        waiting.until(lambda: (2, 7) in told)
        releases.put(8, (1,))
        waiting.until(lambda: told == {(1, 7), (1, 8), (2, 7)})
    finally:
        releases.close()
    assert not refusals


def test_an_error_of_sending_is_logged_and_keeps_no_news_from_going_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fails = True
    told: set[tuple[int, int]] = set()

    def send(worker: int, context_ids: Sequence[int]) -> None:
        if worker == 1 and fails:
            raise MemoryError("no room for the ids")
        told.update((worker, context_id) for context_id in context_ids)

    releases = Releases("test-releases", send)
    try:
        releases.put(7, (1, 2))
        waiting.until(lambda: (2, 7) in told)
        fails = False
        releases.put(8, (1, 2))
        waiting.until(lambda: told == {(2, 7), (1, 8), (2, 8)})
    finally:
        releases.close()
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.getMessage() == "worker 1 is not told which contexts are over: [7]"
    assert "no room for the ids" in caplog.text
