"""Lets ``torch.futures.wait_all`` and ``collect_all`` end with the first error of a call.

Torch's C++ ends them early for an error that C++ has set, which Python code cannot do
without losing the error's type. Owns the function that takes the place of torch's
while this process is a worker; futures that are none of ours it leaves to torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, Final

import torch

from rpc.outcomes.futures import Future, collect

_torchs: Final = torch._C._collect_all


def collect_all(futures: Iterable[torch._C.Future[Any]]) -> torch._C.Future[Any]:
    """A future of the list of ``futures`` when all are done, or of the first one's error."""
    given = list(futures)  # a generator can be gone through once
    ours = [future for future in given if isinstance(future, Future)]
    all_done = _torchs(given)
    if not ours:
        return all_done
    together = _Together(given, ours[0])
    collect(ours, together)
    all_done.add_done_callback(together.end)
    return together


def use() -> None:
    """Puts :func:`collect_all` in the place of torch's function, which both of torch's call."""
    torch._C._collect_all = collect_all


def stop_using() -> None:
    """Puts torch's function back."""
    torch._C._collect_all = _torchs


class _Together(Future[Any]):
    """The outcome of several futures, which it waits for as one of them does."""

    def __init__(self, futures: list[torch._C.Future[Any]], model: Future[Any]) -> None:
        super().__init__(description="a list of calls", waiter=model._waiter, waker=model._waker)
        self._futures = futures
        self._members = {id(future) for future in futures}
        self._first = threading.Lock()

    def waits_for(self, future: Future[Any]) -> bool:
        """True if a future is one of them."""
        return id(future) in self._members

    def failed(self, error: BaseException) -> None:
        """Ends with the error of one that failed."""
        if self._first.acquire(blocking=False):
            self.set_exception(error)

    def end(self, all_done: torch._C.Future[Any]) -> None:
        """Ends as all are done, or C++ saw an error."""
        if not self._first.acquire(blocking=False):
            return
        try:
            all_done.value()
        except BaseException as error:
            self.complete_or_leave(None, error)
        else:
            self.complete_or_leave(self._futures, None)
