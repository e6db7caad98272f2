"""Keys and values that all workers of a group see, for packages above ``rpc``.

Owns how they lie in the group's store: apart from ``rpc``'s own keys and from each other,
and so that no request waits for a key that is not there, as a ``get`` of torch's would.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any, TypeVar

from torch._C._distributed_c10d import PrefixStore, Store

from rpc.errors import AgentClosedError, RpcError
from rpc.runtime.executor import blocking
from rpc.runtime.store_visits import ProcessEndsError, visit

T = TypeVar("T")

_PREFIX = "tensorwire-extend"
_NAMESPACE = re.compile(r"[A-Za-z0-9._-]{1,200}")
_MARK = b"="
"""Begins every value in the store, which takes an empty one for none."""


class KeyValueStore:
    """One namespace of the group's store. Every method is one atomic request.

    Args:
        store: the group's.
        namespace: see :func:`rpc.extend.store`.

    Raises:
        ValueError: the namespace has other characters.
    """

    def __init__(self, store: Store, namespace: str) -> None:
        if not isinstance(namespace, str) or _NAMESPACE.fullmatch(namespace) is None:
            raise ValueError(
                f"namespace={namespace!r} must be 1 to 200 letters, digits, '.', '-' and '_'"
            )
        # Stubs say str where C++ takes bytes as well, which need not be text.
        self._values: Any = PrefixStore(f"{_PREFIX}/{namespace}/value", store)
        self._counts: Any = PrefixStore(f"{_PREFIX}/{namespace}/count", store)

    def get(self, key: str) -> bytes | None:
        """The value under ``key``; None if there is none. Never waits for one.

        Raises:
            RpcError: the store does not answer.
        """
        nobodys = os.urandom(16)  # nobody's value, so that nothing is changed
        return _read(_ask(self._values.compare_set, key, nobodys, nobodys), nobodys)

    def set(self, key: str, value: bytes) -> None:
        """Puts ``value`` under ``key``, whatever was there."""
        _ask(self._values.set, key, _MARK + _checked("value", value))

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
        after = _MARK + _checked("value", value)
        if expected is None:
            found: bytes = _ask(self._values.compare_set, key, b"", after)
            return _read(found, b"")
        before = _MARK + _checked("expected", expected)
        if before == after:
            return self.get(key)  # there is nothing to change
        # Where there is nothing, the store answers with what was expected.
        return _read(_ask(self._values.compare_set, key, before, after), before)

    def add(self, key: str, amount: int = 1) -> int:
        """Adds to a counter, which begins at 0; returns what it is then.

        Counters and values do not meet: both may have the same key.
        """
        return int(_ask(self._counts.add, key, amount))

    def delete(self, key: str) -> None:
        """Deletes the value and the counter under ``key``, if there are any."""
        _ask(self._values.delete_key, key)
        _ask(self._counts.delete_key, key)


def _read(found: bytes, nothing: bytes) -> bytes | None:
    return None if found == nothing else found[len(_MARK) :]


def _checked(argument: str, value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError(f"{argument}={value!r} is a {type(value).__name__}, not bytes")
    return value


def _ask(request: Callable[..., T], key: str, *values: object) -> T:
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
            return request(key, *values)
    except ProcessEndsError:
        raise AgentClosedError(f"the store is not asked for {key!r}: this process ends") from None
    except RuntimeError as error:
        raise RpcError(
            f"the group's store did not answer for {key!r}; is the worker that hosts it, usually "
            f"rank 0, still running? ({error})"
        ) from error
