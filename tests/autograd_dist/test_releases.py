"""News of contexts that are over: bundled, and sent until it has gone out."""

from __future__ import annotations

from collections.abc import Sequence

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
