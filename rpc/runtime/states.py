"""Objects that packages above ``rpc`` keep with a worker, under keys, until it shuts down.

Owns their making, once for each key, and has them leave and close. Knows nothing of workers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable
from typing import Any, TypeVar, cast

from rpc.errors import AgentClosedError

T = TypeVar("T")


class _State:
    """One object, made by the first who asks for it; who asks meanwhile waits."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._made: list[Any] = []
        self._close: Callable[[Any], object] | None = None
        self._leave: Callable[[Any], object] | None = None

    def get(
        self,
        factory: Callable[[], Any],
        close: Callable[[Any], object] | None,
        leave: Callable[[Any], object] | None,
    ) -> Any:
        if not self._made:
            with self._lock:
                if not self._made:
                    self._close, self._leave = close, leave
                    self._made.append(factory())
        return self._made[0]

    def leave(self) -> None:
        if self._made and self._leave is not None:
            self._leave(self._made[0])

    def close(self) -> None:
        if self._made and self._close is not None:
            self._close(self._made[0])


class States:
    """The objects of one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: dict[Hashable, _State] = {}
        self._closed = False

    def get(
        self,
        key: Hashable,
        factory: Callable[[], T],
        close: Callable[[T], object] | None = None,
        leave: Callable[[T], object] | None = None,
    ) -> T:
        """The object under ``key``, made by ``factory`` if there is none.

        Raises:
            AgentClosedError: the worker shut down.
        """
        with self._lock:
            if self._closed:
                raise AgentClosedError(f"this worker shut down, and keeps nothing for {key!r}")
            state = self._states.get(key)
            if state is None:
                state = self._states[key] = _State()
        return cast(T, state.get(factory, close, leave))

    def close(self) -> None:
        """Closes every object, the latest first; raises the first error when all were closed."""
        with self._lock:
            self._closed = True
            states = list(self._states.values())
            self._states.clear()
        _do_all(state.close for state in reversed(states))

    def leave(self) -> None:
        """Tells every object that the worker begins to leave; raises as :meth:`close` does."""
        with self._lock:
            states = list(self._states.values())
        _do_all(state.leave for state in reversed(states))


def _do_all(steps: Iterable[Callable[[], object]]) -> None:
    """Takes every step, whatever another one raises; raises the first error at the end."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first
