"""The group's store, where nobody is believed who does not have the group's key.

A store may be anybody's: torchrun's, a file. So each value carries the nonce of this run of the
group, a version that rises with each change, and an HMAC over those, the name of its key and
itself, under a key that follows from the group's. Without a group key everything works the
same, and protects from accidents only.

A worker remembers the newest value that it has seen under each key. A value that is missing,
has no valid proof, is of another run or of a lower version is *no news*: the worker goes on with
what it remembers, and writes that to the store again. So deleting values, overwriting them and
putting old ones back changes nothing for whoever has read them once. Two different values of one
version cannot come from an honest store: reading the second one is an error.

A worker that has just come remembers nothing, and takes the first value with a proof for the
newest. Where the store is not ours, and the value matters, it asks a living member: see
``member_list`` for what the group itself does, and the parameter server's ``confirming``.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import hmac
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from torch._C._distributed_c10d import Store
from torch.distributed import DistNetworkError

from rpc.errors import BringUpError
from rpc.group.own_store import OwnStore
from rpc.group.store_values import (
    CODE_DIGITS,
    END_OF_HEAD,
    HEAD_BYTES,
    MARK_DIGITS,
    VERSION,
    to_be_signed,
)
from rpc.group.store_watch import StoreWatch

_logger = logging.getLogger("rpc")

_MOST_TRIES: Final = 100
"""Changes in a row that fail although nobody else's succeeds."""
_MOST_NAMED: Final = 20

_RUN_DIGITS: Final = 16
_NO_RUN: Final = b"0" * _RUN_DIGITS
"""Stands for the nonce where a store has none."""
_VERSION_DIGITS: Final = 12
_VALUE, _DELETED = b"=", b"-"
_BODY_HEAD_BYTES: Final = _RUN_DIGITS + _VERSION_DIGITS + len(_VALUE)


class Fault(enum.Enum):
    """The reasons why what a store holds counts for nothing."""

    STRANGER = "somebody without the group's key can write to the store"
    ANOTHER_KEY = "it was written with another group_key; give every worker of the group the same"
    ANOTHER_RUN = "it is of another run of the group, and was put back"
    OLDER = "it is older than what was there before, and was put back"
    MISSING = "it was there before, and was deleted"


class Forgeries:
    """Values that count for nothing: each key is named in the log once.

    Attributes:
        have_another_key: one of them was written by a worker with another key, or looks so.
    """

    def __init__(self) -> None:
        self.have_another_key = False
        self._named: set[str] = set()

    def found(self, key: str, fault: Fault) -> None:
        """Notes what was read under a key."""
        self.have_another_key = self.have_another_key or fault is Fault.ANOTHER_KEY
        if key in self._named or len(self._named) >= _MOST_NAMED:
            return
        self._named.add(key)
        _logger.warning("ignored what the group's store holds under %r: %s", key, fault.value)


@dataclass(frozen=True, slots=True)
class _Seen:
    """A value that a member wrote; version 0 stands for none.

    Args:
        version: rises with each change.
        value: None if it was deleted, or never there.
        raw: as it lies in the store.
    """

    version: int = 0
    value: bytes | None = None
    raw: bytes = b""


_NOTHING: Final = _Seen()


class _Memory:
    """The newest values that this process has seen, by the names of their keys."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest: dict[str, _Seen] = {}

    def newest(self, name: str) -> _Seen:
        with self._lock:
            return self._newest.get(name, _NOTHING)

    def take(self, name: str, seen: _Seen) -> _Seen:
        """Returns the newest value, which is now the one that was found if that is newer.

        Raises:
            BringUpError: there is another value of the same version.
        """
        with self._lock:
            known = self._newest.get(name, _NOTHING)
            if seen.version > known.version:
                self._newest[name] = known = seen
        if seen.version == known.version and seen.raw != known.raw:
            raise BringUpError(
                f"the group's store holds another value of version {seen.version} under {name!r} "
                "than before, and nobody can know which of the two counts: it lost what it had, "
                "or somebody put it back while it was replaced. Start the job again"
            )
        return known


class SignedStore:
    """Keys and values of a group, authenticated by its key.

    Every method is one request, or one for each key, where nobody else interferes, and raises
    ``BringUpError`` if the store does not answer, or holds two values of one version.

    Args:
        store: any of torch's, or an ``OwnStore``.
        group_key: the group's secret; empty if it has none.
        prefix: what the names of all keys begin with.
    """

    def __init__(self, store: Store, group_key: bytes, prefix: str) -> None:
        self.forgeries = Forgeries()
        self._memory = _Memory()
        self._key = signing_key(group_key)
        self._mark = key_mark(group_key)
        self._prefix = prefix
        # torch's stubs say str where C++ takes bytes as well, which need not be text.
        self._store: Any = store
        self._job = f"{store.prefix}/"[1:] if isinstance(store, OwnStore) else ""
        self._own_nothing = b"?" + os.urandom(16)

    def below(self, part: str) -> SignedStore:
        """The keys whose names begin with ``part`` and a slash."""
        made = object.__new__(SignedStore)
        made.__dict__.update(self.__dict__)
        made._prefix = f"{self._prefix}/{part}"
        return made

    def answer_by(self, until: float) -> None:
        """Sets the monotonic time until which the store may answer, where that can be set."""
        if isinstance(self._store, OwnStore):
            self._store.until = until

    def watch(self, keys: Sequence[str], told: Callable[[], None]) -> StoreWatch:
        """See :meth:`rpc.group.own_store.OwnStore.watch`."""
        if not isinstance(self._store, OwnStore):
            return StoreWatch()
        return self._store.watch([self._name(key) for key in keys], told)

    def get(self, key: str) -> bytes | None:
        """The newest value under a key that was ever seen here; None if there is none."""
        return self.get_all([key])[0]

    def get_all(self, keys: Sequence[str]) -> list[bytes | None]:
        """The values under several keys."""
        return [seen.value for seen in self._read_all(keys)]

    def may_have(self, key: str) -> bool:
        """False if there is nothing under a key; not every store can say so."""
        if not isinstance(self._store, OwnStore):
            return True
        with names_store_loss():
            return self._store.check([self._name(key)])

    def set(self, key: str, value: bytes) -> None:
        """Puts a value under a key, whatever was there."""
        self._put_over(key, value)

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Puts a value under a key that has the expected one.

        Args:
            key: its name.
            expected: what has to be there; None for nothing that can be believed.
            value: what is to be there.

        Returns:
            What is there afterwards, None for nothing.
        """
        known = self._memory.newest(self._name(key))
        if known.value != expected:
            known = self._read_all([key])[0]
            if known.value != expected:
                return known.value
        lies, tries = known.raw, 0
        while known.value == expected:
            stored = self._exchange(key, lies, known.version + 1, value)
            if stored is None:
                return value
            newest = self._judge(key, stored)
            tries = _count_try(key, tries, newest.version > known.version)
            lies, known = stored, newest
        self._put_back(key, lies, known)
        return known.value

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0; returns what it is then."""
        if not amount:
            return self.counts([key])[0]
        before = self._memory.newest(self._name(key)).value
        while True:
            count = _count_in(before) + amount
            # The random part tells our own change from an equal one of somebody else.
            wanted = b"%d %s" % (count, os.urandom(8).hex().encode())
            stored = self.compare_and_set(key, before, wanted)
            if stored == wanted:
                return count
            before = stored

    def counts(self, keys: Sequence[str]) -> list[int]:
        """Reads several counters."""
        return [_count_in(value) for value in self.get_all(keys)]

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
        """Deletes the value under a key, if there is one: says so in its place."""
        if self.get(key) is not None:
            self._put_over(key, None)

    # --- What lies in the store

    def _put_over(self, key: str, value: bytes | None) -> None:
        known, tries = self._memory.newest(self._name(key)), 0
        lies = known.raw
        while (stored := self._exchange(key, lies, known.version + 1, value)) is not None:
            newest = self._judge(key, stored)
            tries = _count_try(key, tries, newest.version > known.version)
            lies, known = stored, newest

    def _exchange(self, key: str, lies: bytes, version: int, value: bytes | None) -> bytes | None:
        """Puts a value in the place of what lies there; returns what does if that is another."""
        wanted = self._signed(key, version, value)
        stored = self._ask(key, lies, wanted.raw)
        if stored == wanted.raw:
            self._memory.take(self._name(key), wanted)
            return None
        return stored

    def _ask(self, key: str, expected: bytes, wanted: bytes) -> bytes:
        """One compare-and-set; returns what lies there then, which may be nothing."""
        with names_store_loss():
            stored = bytes(self._store.compare_set(self._name(key), expected, wanted))
        return b"" if stored == expected != wanted else stored  # what stores say of an absent key

    def _read_all(self, keys: Sequence[str]) -> list[_Seen]:
        nothing = self._own_nothing  # nobody's value, so that nothing is changed
        with names_store_loss():
            if isinstance(self._store, OwnStore):
                changes = [(self._name(key), nothing, nothing) for key in keys]
                stored = self._store.compare_set_all(changes)
            else:
                ask = self._store.compare_set
                stored = [bytes(ask(self._name(key), nothing, nothing)) for key in keys]
        return [self._learn(key, lies) for key, lies in zip(keys, stored, strict=True)]

    def _learn(self, key: str, stored: bytes) -> _Seen:
        """The newest value under a key in which something was found; that lies there then."""
        lies = b"" if stored == self._own_nothing else stored
        known = self._judge(key, lies)
        self._put_back(key, lies, known)
        return known

    def _judge(self, key: str, lies: bytes) -> _Seen:
        """The newest value under a key in which something lies."""
        name = self._name(key)
        known = self._memory.newest(name)
        seen = None if lies == known.raw else self._opened(key, lies)
        return known if seen is None else self._memory.take(name, seen)

    def _put_back(self, key: str, lies: bytes, known: _Seen) -> None:
        """Writes the newest value again where another lies, unless that changed meanwhile."""
        if known.version and lies != known.raw and self._ask(key, lies, known.raw) == known.raw:
            self.forgeries.found(key, Fault.OLDER if lies else Fault.MISSING)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _signed(self, key: str, version: int, value: bytes | None) -> _Seen:
        kind = _DELETED if value is None else _VALUE
        body = b"%s%0*x%s%s" % (self._run(), _VERSION_DIGITS, version, kind, value or b"")
        return _Seen(version, value, self._head(key, body) + body)

    def _head(self, key: str, body: bytes) -> bytes:
        name = f"{self._job}{self._name(key)}".encode()
        signed = to_be_signed(name, body)
        code = hmac.digest(self._key, signed, hashlib.sha256).hex()[:CODE_DIGITS].encode()
        return b"".join((VERSION, self._mark, code, END_OF_HEAD))

    def _run(self) -> bytes:
        """The nonce of this run of the group."""
        return self._store.run if isinstance(self._store, OwnStore) else _NO_RUN

    def _opened(self, key: str, lies: bytes) -> _Seen | None:
        """The value in what the store holds, if a member wrote it in this run of the group."""
        if not lies:
            return None
        head, body = lies[:HEAD_BYTES], lies[HEAD_BYTES:]
        if not hmac.compare_digest(head, self._head(key, body)):
            mark = head[len(VERSION) : len(VERSION) + MARK_DIGITS]
            is_ours = head.startswith(VERSION) and head.endswith(END_OF_HEAD)
            another = is_ours and mark != self._mark
            self.forgeries.found(key, Fault.ANOTHER_KEY if another else Fault.STRANGER)
            return None
        if body[:_RUN_DIGITS] != self._run():
            self.forgeries.found(key, Fault.ANOTHER_RUN)
            return None
        version = int(body[_RUN_DIGITS : _RUN_DIGITS + _VERSION_DIGITS], 16)
        is_there = body[_BODY_HEAD_BYTES - 1 : _BODY_HEAD_BYTES] == _VALUE
        return _Seen(version, body[_BODY_HEAD_BYTES:] if is_there else None, lies)


def _count_try(key: str, tries: int, is_progress: bool) -> int:
    """Counts a change that failed, unless it did because somebody else's succeeded.

    Raises:
        BringUpError: too many did.
    """
    if is_progress:
        return 0
    if tries < _MOST_TRIES:
        return tries + 1
    raise BringUpError(
        f"the group's store holds under {key!r} what was written without the group's key, "
        "however often it is replaced: somebody else writes to it"
    )


def _count_in(value: bytes | None) -> int:
    return 0 if value is None else int(value.split()[0])


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
