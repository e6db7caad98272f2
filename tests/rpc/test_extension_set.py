"""What extensions enter around a handler, and how it is left."""

from __future__ import annotations

from types import TracebackType

import pytest

from rpc.extension_set import Scopes, leave


class Scope:
    def __init__(self, name: str, left: list[object], error: BaseException | None = None) -> None:
        self._name, self._left, self._error = name, left, error

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._left.append((self._name, kind, error, trace is not None))
        if self._error is not None:
            raise self._error


def test_scopes_are_left_in_reverse_order() -> None:
    left: list[object] = []
    scopes: Scopes = [Scope("first", left), Scope("second", left)]
    leave(scopes, None)
    assert left == [("second", None, None, False), ("first", None, None, False)]
    assert scopes == []


def test_scopes_learn_what_was_raised_in_them() -> None:
    left: list[object] = []
    with pytest.raises(KeyError) as raised:
        raise KeyError("x")
    leave([Scope("one", left)], raised.value)
    assert left == [("one", KeyError, raised.value, True)]


def test_all_scopes_are_left_though_one_raises() -> None:
    left: list[object] = []
    scopes: Scopes = [Scope("first", left), Scope("second", left, ValueError("no"))]
    with pytest.raises(ValueError, match="no"):
        leave(scopes, None)
    assert [row[0] for row in left] == ["second", "first"]  # type: ignore[index]
