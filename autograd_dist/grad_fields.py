"""Who uses the ``.grad`` of which leaves on one worker.

A backward pass borrows it while torch accumulates, and an optimizer's step puts
gradients there. Both may wait for other workers meanwhile, as for the reduction of
DistributedDataParallel, and what they wait for may need a pass or a step here. So
only those that share a leaf wait for each other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

import torch


class GradFields:
    """The ``.grad`` fields of one worker's leaves."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._user_of: dict[int, int] = {}
        self._waiting = 0

    def used(self, leaves: Iterable[torch.Tensor]) -> _Use:
        """A ``with`` block in which no other thread uses the ``.grad`` of some leaves.

        Blocks nest, as a hook may run another pass.

        Args:
            leaves: whose; kept alive by the caller as long as the block lasts.
        """
        return _Use(self, frozenset(map(id, leaves)))

    def _take(self, wanted: frozenset[int], taken: set[int]) -> None:
        me, user_of = threading.get_ident(), self._user_of

        def are_free() -> bool:
            return all(user_of.get(leaf, me) == me for leaf in wanted)

        with self._lock:
            if not wanted.isdisjoint(user_of):
                # All at once: who holds some never waits for the rest.
                self._waiting += 1
                try:
                    self._changed.wait_for(are_free)
                finally:
                    self._waiting -= 1
            taken.update(wanted - user_of.keys())
            user_of.update(dict.fromkeys(taken, me))

    def _give_back(self, taken: set[int]) -> None:
        me, user_of = threading.get_ident(), self._user_of
        with self._lock:
            for leaf in taken:
                if user_of.get(leaf) == me:
                    del user_of[leaf]
            if self._waiting:
                self._changed.notify_all()


class _Use:
    """One block in which leaves are used."""

    __slots__ = ("_fields", "_taken", "_wanted")

    def __init__(self, fields: GradFields, wanted: frozenset[int]) -> None:
        self._fields = fields
        self._wanted = wanted
        self._taken: set[int] = set()

    def __enter__(self) -> None:
        try:
            self._fields._take(self._wanted, self._taken)
        except BaseException:  # a signal handler's
            self._fields._give_back(self._taken)
            raise

    def __exit__(self, *_: object) -> None:
        self._fields._give_back(self._taken)
