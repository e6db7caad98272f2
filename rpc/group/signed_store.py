"""The group's store, where nobody is believed who does not have the group's key.

A ``TCPStore`` asks nobody who it is. So each value carries an HMAC over the name of its key
and itself, under a key that follows from the group's. A value without a valid one counts as
absent, is overwritten by the next member that writes there, and is named in the log once.
Without a group key everything works the same, and protects from accidents only.

What this cannot do: a stranger may still delete values, put old ones back, or fill the
store. Whoever reads a value therefore takes an absent or an older one for no news: see
``member_list``.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from rpc.errors import BringUpError
from rpc.group.store_values import (
    CODE_DIGITS,
    END_OF_HEAD,
    HEAD_BYTES,
    MARK_DIGITS,
    VERSION,
    to_be_signed,
)
from rpc.group.tcp_store import TcpStoreClient

_logger = logging.getLogger("rpc")

_MOST_TRIES: Final = 100
_MOST_NAMED: Final = 20


class Forgeries:
    """Values that were not written with the group's key: each is named in the log once.

    Attributes:
        have_another_key: one of them was written by a worker with another key, or looks so.
    """

    def __init__(self) -> None:
        self.have_another_key = False
        self._named: set[str] = set()

    def found(self, key: str, has_another_key: bool) -> None:
        """Notes what was read under a key."""
        self.have_another_key = self.have_another_key or has_another_key
        if key in self._named or len(self._named) >= _MOST_NAMED:
            return
        self._named.add(key)
        why = (
            "it was written with another group_key; give every worker of the group the same"
            if has_another_key
            else "somebody without the group's key can write to the store"
        )
        _logger.warning("ignored what the group's store holds under %r: %s", key, why)


class SignedStore:
    """Keys and values of a group, authenticated by its key.

    Every method is one request, or one for each key, and raises ``BringUpError`` if the
    store does not answer.

    Args:
        store: any of torch's, or a ``TcpStoreClient``.
        group_key: the group's secret; empty if it has none.
        prefix: what the names of all keys begin with.
        forgeries: where values that cannot be believed are noted.
    """

    def __init__(
        self,
        store: Store,
        group_key: bytes,
        prefix: str,
        forgeries: Forgeries | None = None,
    ) -> None:
        self.forgeries = forgeries or Forgeries()
        self._group_key = group_key
        self._key = signing_key(group_key)
        self._mark = key_mark(group_key)
        self._prefix = prefix
        # torch's stubs say str where C++ takes bytes as well, which need not be text.
        self._store: Any = store
        self._own_nothing = b"?" + os.urandom(16)

    def below(self, part: str) -> SignedStore:
        """The keys whose names begin with ``part`` and a slash."""
        prefix = f"{self._prefix}/{part}"
        return SignedStore(self._store, self._group_key, prefix, self.forgeries)

    def answer_by(self, until: float) -> None:
        """Sets the monotonic time until which the store may answer, where that can be set."""
        if isinstance(self._store, TcpStoreClient):
            self._store.until = until

    def get(self, key: str) -> bytes | None:
        """The value under a key; None if there is none that can be believed."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values under several keys."""
        nothing = self._own_nothing  # nobody's value, so that nothing is changed
        with names_store_loss():
            if isinstance(self._store, TcpStoreClient):
                changes = [(self._name(key), nothing, nothing) for key in keys]
                found = self._store.compare_set_all(changes)
            else:
                ask = self._store.compare_set
                found = [ask(self._name(key), nothing, nothing) for key in keys]
        return [self._opened(key, value) for key, value in zip(keys, found, strict=True)]

    def may_have(self, key: str) -> bool:
        """False if there is nothing under a key; not every store can say so."""
        if not isinstance(self._store, TcpStoreClient):
            return True
        with names_store_loss():
            return self._store.check([self._name(key)])

    def set(self, key: str, value: bytes) -> None:
        """Puts a value under a key, whatever was there."""
        with names_store_loss():
            self._store.set(self._name(key), self._signed(key, value))

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Puts a value under a key that has the expected one.

        Args:
            key: its name.
            expected: what has to be there; None for nothing that can be believed.
            value: what is to be there.

        Returns:
            What is there afterwards, None for nothing.
        """
        signed = self._signed(key, value)
        before = b"" if expected is None else self._signed(key, expected)
        for _ in range(_MOST_TRIES):
            with names_store_loss():
                found = bytes(self._store.compare_set(self._name(key), before, signed))
            if found == signed:
                return value
            if expected is not None and found == before:
                return None  # what stores say of an absent key
            known = self._opened(key, found)
            if known is not None or expected is not None:
                return known
            before = found
        raise BringUpError(
            f"the group's store holds under {key!r} what was written without the group's key, "
            "however often it is replaced: somebody else writes to it"
        )

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""
        while True:
            before = self.get(key)
            count = (0 if before is None else int(before.split()[0])) + amount
            # The random part tells our own change from an equal one of somebody else.
            wanted = b"%d %s" % (count, os.urandom(8).hex().encode())
            if self.compare_and_set(key, before, wanted) == wanted:
                return count

    def wait(self, keys: Sequence[str], seconds: float) -> bool:
        """Waits until there are values under all keys, which need not be to be believed.

        Returns:
            False if there are not when the time is over.
        """
        time = timedelta(seconds=max(seconds, 0.001))
        with names_store_loss():
            try:
                self._store.wait([self._name(key) for key in keys], time)
            except DistNetworkError:
                raise
            except (TimeoutError, RuntimeError):  # the latter is how torch says the former
                return False
        return True

    def delete(self, key: str) -> None:
        """Deletes the value under a key, if there is one."""
        with names_store_loss():
            self._store.delete_key(self._name(key))

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _signed(self, key: str, value: bytes) -> bytes:
        return b"".join((VERSION, self._mark, self._code(key, value), END_OF_HEAD, value))

    def _code(self, key: str, value: bytes) -> bytes:
        signed = to_be_signed(self._name(key).encode(), value)
        return hmac.digest(self._key, signed, hashlib.sha256).hex()[:CODE_DIGITS].encode()

    def _opened(self, key: str, found: bytes) -> bytes | None:
        """The value in what the store holds, if somebody with the group's key wrote it."""
        if not found or found == self._own_nothing:
            return None
        head, value = found[:HEAD_BYTES], found[HEAD_BYTES:]
        if hmac.compare_digest(head, self._signed(key, value)[:HEAD_BYTES]):
            return value
        mark = head[len(VERSION) : len(VERSION) + MARK_DIGITS]
        is_ours = head.startswith(VERSION) and head.endswith(END_OF_HEAD)
        self.forgeries.found(key, is_ours and mark != self._mark)
        return None


def signing_key(group_key: bytes) -> bytes:
    """The key under which values of a group are signed."""
    return hmac.digest(group_key, b"tensorwire store", hashlib.sha256)


def key_mark(group_key: bytes) -> bytes:
    """Tells workers that were given different keys apart.

    It has 16 bits: enough for that, too few to confirm a guess, as many keys share a mark.
    Nothing is believed because of it.
    """
    digest = hmac.new(group_key, b"tensorwire key mark", hashlib.sha256)
    return digest.hexdigest()[:MARK_DIGITS].encode()


@contextlib.contextmanager
def names_store_loss() -> Iterator[None]:
    """Turns what is raised where the store is gone into an error that says so.

    Raises:
        BringUpError: the store was lost.
    """
    try:
        yield
    except BringUpError:
        raise
    except (RuntimeError, OSError) as error:
        raise BringUpError(
            "the store was lost at which the group meets; is the worker that hosts it, usually "
            f"rank 0, still running? ({error})"
        ) from error
