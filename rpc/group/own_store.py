"""The stores that are ours to speak to: what the group uses of them beyond torch's interface."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch._C._distributed_c10d import Store

from rpc.group.store_watch import StoreWatch


class OwnStore(Store):
    """A client of a store in which jobs are kept apart.

    Attributes:
        prefix: what the names of all keys begin with in the store.
        until: the monotonic time at which the request under way fails at the latest.
        server: kept alive as long as this, if this process hosts the store.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix
        self.until = math.inf
        self.server: object = None

    @property
    def run(self) -> bytes:
        """Says which run of the job the store holds; 16 bytes.

        Raises:
            OSError: it is not known yet, and the store does not answer.
        """
        raise NotImplementedError

    def compare_set_all(
        self, changes: Sequence[tuple[str, str | bytes, str | bytes]]
    ) -> list[bytes]:
        """Puts each desired value under a key that has the expected one; returns what is there.

        They are not one step.
        """
        raise NotImplementedError

    def watch(self, keys: Sequence[str], told: Callable[[], None]) -> StoreWatch:
        """Calls ``told`` whenever keys may have changed, if this store can tell.

        Args:
            keys: their names.
            told: must neither block nor raise.

        Returns:
            The watch, which the caller closes.
        """
        return StoreWatch()
