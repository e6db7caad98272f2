"""Divides the work of kernels, which run without the interpreter lock, among idle cores.

The helpers (:class:`rpc.extend.Helpers`) belong to the current worker; code that runs outside
any worker has none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import rpc
from rpc import extend
from rpc.extend import Helpers

MOST_SHARES: Final = 4
WORTH: Final = 1 << 20
"""Bytes to read or write from which a share is worth the waking of a helper."""

Work = Callable[[], None]


def _helpers() -> Helpers | None:
    worker = extend.find_worker()
    if worker is None:
        return None
    try:
        return worker.state(Helpers, _new_helpers, Helpers.close)
    except rpc.AgentClosedError:
        return None


def _new_helpers() -> Helpers:
    return Helpers("tensorwire-ps-share")


def share_out(works: Sequence[Work]) -> None:
    """Does all of it, several at a time where cores are idle.

    Args:
        works: none of which needs what another does.
    """
    helpers = _helpers() if len(works) > 1 else None
    if helpers is not None:
        helpers.run(works)
        return
    for work in works:
        work()


def shares_of(nbytes: int) -> int:
    """The number of shares into which work that reads or writes so many bytes is divided."""
    if nbytes < 2 * WORTH:
        return 1
    helpers = _helpers()
    return 1 if helpers is None else min(helpers.count + 1, nbytes // WORTH)


def divide(count: int, nbytes: int, work: Callable[[int, int], None]) -> None:
    """Calls ``work(begin, end)`` for ranges that together are all of ``range(count)``.

    Args:
        count: of rows or elements, each of which is worked on by itself.
        nbytes: read or written in all.
        work: does a range.
    """
    parts = min(shares_of(nbytes), count)
    if parts < 2:
        work(0, count)
        return
    ends = [count * part // parts for part in range(parts + 1)]

    def of(part: int) -> Work:
        return lambda: work(ends[part], ends[part + 1])

    share_out([of(part) for part in range(parts)])
