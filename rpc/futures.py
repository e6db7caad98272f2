"""The future a caller holds: torch's own, which can also be awaited.

Owns how results and errors reach whoever waits. It does not know calls or
messages; the agent gives it a way to wait and completes it.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import torch

from rpc.executor import blocking

T = TypeVar("T")
S = TypeVar("S")

if TYPE_CHECKING:
    _TorchFuture = torch.futures.Future
else:

    class _TorchFuture(torch.futures.Future, Generic[T]):
        """``torch.futures.Future`` spelled so that it can be subscripted at run time."""


Waiter = Callable[[Callable[[], bool], Callable[[], None]], None]

_logger = logging.getLogger("rpc")


class Future(_TorchFuture[T]):
    """The result of an asynchronous call.

    A :class:`torch.futures.Future` (so ``wait``, ``value``, ``done``, ``then``,
    ``add_done_callback``, ``torch.futures.wait_all`` and ``collect_all`` work),
    which can also be awaited in asyncio code. A failure that nobody ever looks
    at is logged when the future is collected.

    Args:
        devices: as for torch's.
        description: what the future is the result of, for that log line.
        waiter: how to wait; the default sleeps.
    """

    def __init__(
        self,
        *,
        devices: list[int | str | torch.device] | None = None,
        description: str = "a call",
        waiter: Waiter | None = None,
    ) -> None:
        super().__init__(devices=devices)
        self._description = description
        self._waiter = waiter
        self._unseen_error: BaseException | None = None
        self._lock = threading.RLock()
        self._watched = False

    def wait(self) -> T:
        """Blocks until the result is there and returns it, or raises the call's error."""
        if not self.done():
            with blocking():
                if self._waiter is None:
                    return cast(T, self._result(super().wait))
                self._waiter(self.done, self._sleep)
        return cast(T, self._result(super().wait))

    def value(self) -> T:
        """Returns the result of a completed future, or raises its error."""
        return cast(T, self._result(super().value))

    def then(self, callback: Callable[..., S]) -> Future[S]:
        """Returns a future of what ``callback(self)`` returns once this one is done.

        The callback runs in the context (distributed autograd, deadline) of this
        call to ``then``. What it raises fails the returned future.
        """
        if not callable(callback):
            raise TypeError(f"then(): incompatible function arguments. Got {callback!r}")
        child: Future[S] = Future(description=f"a callback on {self._description}")
        child._waiter = self._waiter
        context = contextvars.copy_context()

        def run(_: object) -> None:
            child.complete_from(lambda: context.run(callback, self))

        self.add_done_callback(run)
        return child

    def add_done_callback(self, callback: Callable[..., None]) -> None:
        """Calls ``callback(self)`` when done, or now if it already is."""
        self._unseen_error = None
        with self._lock:
            self._watched = True
        super().add_done_callback(callback)

    def complete_unless_watched(self, value: T | None, error: BaseException | None) -> bool:
        """Completes the future if that runs no callback; False, and nothing done, if it would."""
        with self._lock:
            if self._watched:
                return False
            if error is None:
                self.set_result(cast(T, value))
            else:
                self.set_exception(error)
            return True

    def set_exception(self, result: BaseException) -> None:  # type: ignore[override]
        """Completes the future with an error, which ``wait`` and ``value`` raise."""
        if not self._watched:
            self._unseen_error = result
        super().set_exception(cast(Any, result))

    def complete_from(self, get: Callable[[], T]) -> None:
        """Completes the future with what ``get()`` returns or raises."""
        try:
            value = get()
        except Exception as error:
            self.set_exception(error)
        else:
            self.set_result(value)

    def __await__(self) -> Generator[Any, None, T]:
        """Waits without blocking the running asyncio loop."""
        loop = asyncio.get_running_loop()
        bridge: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not bridge.done():
                bridge.set_result(None)

        self.add_done_callback(lambda _: (loop.call_soon_threadsafe(wake), None)[1])
        yield from bridge
        return cast(T, self._result(super().value))

    def _sleep(self) -> None:
        self._result(super().wait, swallow=True)

    def _result(self, get: Callable[[], Any], *, swallow: bool = False) -> Any:
        try:
            return get()
        except BaseException:
            self._unseen_error = None
            if not swallow:
                raise
            return None

    def __del__(self) -> None:
        error = getattr(self, "_unseen_error", None)
        if error is not None:
            _logger.error("%s failed and nobody looked: %s", self._description, error)
