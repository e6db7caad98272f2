"""Completes futures on threads that their callbacks may block."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rpc.runtime.executor import SECONDS_TO_END, Executor
from rpc.transports.base import Transport

_logger = logging.getLogger("rpc")


@dataclass(frozen=True, slots=True)
class _Completion:
    """The completion of a future, as a task of an executor."""

    task: Callable[[], None]
    owner: Completions

    def __call__(self) -> None:
        try:
            self.task()
        finally:
            self.owner.ended()

    def run(self) -> None:
        """Completes the future, as the executor would."""
        try:
            self()
        except Exception:
            _logger.exception("a callback of a future raised an error that nobody handles")


class _CallbackState(threading.local):
    """The state of the running thread while it delivers."""

    must_not_block: bool = False


class Completions:
    """Runs callbacks of futures on the system executor, and knows if any are left.

    None is ever dropped, or somebody might wait forever: what the executor does not
    run because it closes runs on the thread that closes it.

    Args:
        executor: of the agent's own tasks.
        transport: says what its delivering threads may be used for.
        changed: called whenever one has ended.

    Attributes:
        lends_delivery: a future without callbacks may be completed where its reply is
            delivered, although torch may have given it some that nobody can see.
    """

    def __init__(
        self, executor: Executor, transport: Transport, changed: Callable[[], None]
    ) -> None:
        self._executor = executor
        self._guests = transport.inline_completions
        self._changed = changed
        self._lock = threading.Lock()
        self._left = 0
        self._here = _CallbackState()
        self.lends_delivery = transport.delivers_while_waiting

    def submit(self, task: Callable[[], None]) -> None:
        """Queues ``task``."""
        completion = self._counted(task)
        if not self._executor.submit(completion):
            completion.run()

    def run_on_delivery(self, task: Callable[[], None]) -> None:
        """Runs ``task`` on the calling, delivering thread if the transport can spare it."""
        completion = self._counted(task)
        guests = 0 if self._here.must_not_block else self._guests
        if not self._executor.run_here(completion, guests):
            completion.run()

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Lets the calling thread run nothing of this kind, for it has more to deliver."""
        self._here.must_not_block = True
        try:
            yield
        finally:
            self._here.must_not_block = False

    def close(self, seconds: float = SECONDS_TO_END) -> None:
        """Closes the executor, whose running tasks get some ``seconds`` to end."""
        for task in self._executor.close(seconds):
            if isinstance(task, _Completion):
                task.run()

    def ended(self) -> None:
        """Counts a task that has run."""
        with self._lock:
            self._left -= 1
        self._changed()

    def _counted(self, task: Callable[[], None]) -> _Completion:
        with self._lock:
            self._left += 1
        return _Completion(task, self)

    def quiet(self) -> bool:
        """True if none is queued or running."""
        with self._lock:
            return not self._left
