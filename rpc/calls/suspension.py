"""A request that waits for something, and how that ends: it goes on, or is given up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Suspension:
    """Of going on and giving up, does the one that comes first.

    Refers to neither of them any more after that: both may refer back to this.

    Args:
        go_on: called with what is done.
        give_up: called if nobody wants it any more.
        forget: undoes that :meth:`resume` is to be called, if that can be.
    """

    __slots__ = ("_forget", "_turn")

    def __init__(
        self,
        go_on: Callable[[Any], object],
        give_up: Callable[[], None],
        forget: Callable[[Callable[[Any], None]], object] | None,
    ) -> None:
        self._turn = [(go_on, give_up)]  # whoever takes it decides how this ends
        self._forget = forget

    def resume(self, done: Any) -> None:
        """Goes on, unless it was given up."""
        with suppress(IndexError):
            go_on, _ = self._turn.pop()
            self._forget = None
            go_on(done)

    def stop(self) -> None:
        """Gives up, unless it went on."""
        with suppress(IndexError):
            _, give_up = self._turn.pop()
            forget, self._forget = self._forget, None
            if forget is not None:
                forget(self.resume)
            give_up()
