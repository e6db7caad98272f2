"""Keys and values that all workers of a group see, for packages above ``rpc``.

Decides where they lie in the group's store: apart from ``rpc``'s own keys and from each other.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from rpc.errors import AgentClosedError, BringUpError, RpcError
from rpc.group.signed_store import SignedStore
from rpc.group.store_watch import StoreWatch
from rpc.runtime.executor import blocking
from rpc.runtime.store_visits import ProcessEndsError, visit

T = TypeVar("T")

_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,200}")


class KeyValueStore:
    """One namespace of the group's store. Every method is one atomic step.

    A worker never reads an older value than before: one that was deleted, overwritten or put back
    by somebody who is no member changes nothing for it, and is written again. A worker that has
    read nothing yet may be given an old value where the store is not the group's own; what
    decides much is to be confirmed with a member. Two values that members wrote at once, between
    which nobody can decide, are an ``RpcError``.

    Args:
        store: the group's.
        namespace: see :func:`rpc.extend.store`.

    Raises:
        ValueError: the namespace has other characters.
    """

    def __init__(self, store: SignedStore, namespace: str) -> None:
        if not isinstance(namespace, str) or _NAMESPACE.fullmatch(namespace) is None:
            raise ValueError(
                f"namespace={namespace!r} must be 1 to 200 letters, digits, '.', '-' and '_'"
            )
        self._values = store.below(f"extend/{namespace}/value")
        self._counts = store.below(f"extend/{namespace}/count")

    def get(self, key: str) -> bytes | None:
        """The value under ``key``; None if there is none. Never waits for one.

        Raises:
            RpcError: the store does not answer.
        """
        return _ask(key, lambda: self._values.get(key))

    def set(self, key: str, value: bytes) -> None:
        """Puts ``value`` under ``key``, whatever was there."""
        _check("value", value)
        _ask(key, lambda: self._values.set(key, value))

    def compare_and_set(self, key: str, expected: bytes | None, value: bytes) -> bytes | None:
        """Puts ``value`` under ``key`` if ``expected`` is there now.

        Args:
            key: its name.
            expected: what has to be there; None for nothing.
            value: what is to be there.

        Returns:
            What is there afterwards: ``value`` if it was put, or was there before; else what
            is there instead, None for nothing.
        """
        _check("value", value)
        if expected is not None:
            _check("expected", expected)
        if expected == value:
            return self.get(key)  # there is nothing to change
        return _ask(key, lambda: self._values.compare_and_set(key, expected, value))

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0; returns what it is then.

        Counters and values do not meet: both may have the same key.
        """
        return _ask(key, lambda: self._counts.add(key, amount))

    def counts(self, keys: Sequence[str]) -> list[int]:
        """Reads several counters, in one request."""
        return _ask(str(list(keys)), lambda: self._counts.counts(keys))

    def watch(self, *keys: str) -> StoreWatch:
        """A watch that says when values under these keys may have changed; the caller closes it."""
        return self._values.watch(keys, lambda: None)

    def delete(self, key: str) -> None:
        """Deletes the value and the counter under ``key``, if there are any."""
        _ask(key, lambda: self._values.delete(key))
        _ask(key, lambda: self._counts.delete(key))


def _check(argument: str, value: bytes) -> None:
    if not isinstance(value, bytes):
        raise TypeError(f"{argument}={value!r} is a {type(value).__name__}, not bytes")


def _ask(key: str, request: Callable[[], T]) -> T:
    """Makes a request to the store.

    Raises:
        TypeError: ``key`` is no text.
        RpcError: the store does not answer.
        AgentClosedError: this process ends.
    """
    if not isinstance(key, str):
        raise TypeError(f"key={key!r} is a {type(key).__name__}, not a str")
    try:
        with blocking(), visit():
            return request()
    except ProcessEndsError:
        raise AgentClosedError(f"the store is not asked for {key!r}: this process ends") from None
    except BringUpError as error:
        raise RpcError(
            f"the group's store did not answer for {key!r}; is the worker that hosts it, usually "
            f"rank 0, still running? ({error})"
        ) from error
