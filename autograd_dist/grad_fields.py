"""The users of the ``.grad`` of each leaf on one worker.

A backward pass borrows it while torch accumulates, and an optimizer's step puts
gradients there. Both may wait for other workers meanwhile, as for the reduction of
DistributedDataParallel, and what they wait for may need a pass or a step here. So
only those that share a leaf wait for each other, and none longer than somebody
waits for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from autograd_dist.errors import BackwardError
from rpc.errors import CallCancelledError, RpcTimeoutError
from rpc.extend import blocking, is_cancelled, when_cancelled


def _no_limit() -> float:
    return 0.0


class GradFields:
    """The ``.grad`` fields of one worker's leaves.

    Args:
        seconds_left: to what runs in the current context, 0 for no limit; raises
            RpcTimeoutError if there are none.
    """

    def __init__(self, seconds_left: Callable[[], float] = _no_limit) -> None:
        self._seconds_left = seconds_left
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._user_of: dict[int, int] = {}
        self.waiting = 0

    def used(self, leaves: Iterable[torch.Tensor]) -> Use:
        """A ``with`` block in which no other thread uses the ``.grad`` of some leaves.

        Blocks nest, as a hook may run another pass. In a handler, who waits for others does
        so as long as somebody waits for the handler.

        Args:
            leaves: whose; kept alive by the caller as long as the block lasts.

        Raises:
            RpcTimeoutError: as it is entered: the time of the call that is served is over.
            CallCancelledError: the same: that call was given up, or its caller is lost.
        """
        return Use(self, frozenset(map(id, leaves)))

    def _take(self, use: Use) -> None:
        with self._lock:
            if use.wanted.isdisjoint(self._user_of) or self._are_free(use):
                self._note(use)
                return
        forget = when_cancelled(self._look_again)
        try:
            with blocking():
                self._take_later(use, self._patience())
        finally:
            forget()

    def _take_later(self, use: Use, patience: float | None) -> None:
        def is_decided() -> bool:
            return self._are_free(use) or use.is_given_up or is_cancelled()

        with self._lock:
            # All at once: who holds some never waits for the rest.
            self.waiting += 1
            try:
                self._changed.wait_for(is_decided, patience)
            finally:
                self.waiting -= 1
            if not self._are_free(use):
                _give_up(use)
            self._note(use)

    def _patience(self) -> float | None:
        try:
            return self._seconds_left() or None
        except RpcTimeoutError:  # which speaks of a message
            raise _timed_out() from None

    def _are_free(self, use: Use) -> bool:
        """True if nobody else uses these leaves. Needs the lock."""
        me, user_of = threading.get_ident(), self._user_of
        return all(user_of.get(leaf, me) == me for leaf in use.wanted)

    def _note(self, use: Use) -> None:
        """Notes the uses of leaves. Needs the lock."""
        use.taken.update(use.wanted - self._user_of.keys())
        self._user_of.update(dict.fromkeys(use.taken, threading.get_ident()))

    def _give_back(self, taken: set[int]) -> None:
        me, user_of = threading.get_ident(), self._user_of
        with self._lock:
            for leaf in taken:
                if user_of.get(leaf) == me:
                    del user_of[leaf]
            if self.waiting:
                self._changed.notify_all()

    def _look_again(self) -> None:
        """Wakes those who wait, of whom some may have to no more."""
        with self._lock:
            self._changed.notify_all()


class Use:
    """One block in which leaves are used.

    Attributes:
        wanted: the ids of the leaves.
        taken: those that no block around this one uses.
        is_given_up: nobody wants any more what is done in the block.
    """

    __slots__ = ("_fields", "is_given_up", "taken", "wanted")

    def __init__(self, fields: GradFields, wanted: frozenset[int]) -> None:
        self._fields = fields
        self.wanted = wanted
        self.taken: set[int] = set()
        self.is_given_up = False

    def give_up(self) -> None:
        """Has the thread that waits to enter the block raise a ``BackwardError``."""
        self.is_given_up = True
        self._fields._look_again()

    def __enter__(self) -> None:
        try:
            self._fields._take(self)
        except BaseException:  # a signal handler's
            self._fields._give_back(self.taken)
            raise

    def __exit__(self, *_: object) -> None:
        self._fields._give_back(self.taken)


def _give_up(use: Use) -> NoReturn:
    if use.is_given_up:
        raise BackwardError("the pass was over before it could use the .grad of its leaves")
    if is_cancelled():
        raise CallCancelledError(
            "the .grad of a leaf was waited for in a handler that its caller gave up"
        )
    raise _timed_out()


def _timed_out() -> RpcTimeoutError:
    return RpcTimeoutError(
        "RPC ran for more than its timeout while it waited for the .grad of a leaf, which "
        "another pass or step uses"
    )
