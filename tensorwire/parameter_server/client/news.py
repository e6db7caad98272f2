"""Notes between the clients of one cluster, so that nobody has to look time and again.

A note does not say what has changed: whoever waits looks once more. A later view of the cluster
counts as one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable
from typing import Final

import rpc
from rpc import extend

_CHANGED: Final = b"!"
_TELL_ME: Final = b"?"


class News:
    """The notes that one client has heard.

    Args:
        worker: the client.
        channel: on which clients hear of each other, and of views.
        condition: is notified of each note.
        failure: the error after which nothing is to be waited for; None while there is none.
    """

    def __init__(
        self,
        worker: extend.Worker,
        channel: str,
        condition: threading.Condition,
        failure: Callable[[], Exception | None],
    ) -> None:
        self._worker = worker
        self._channel = channel
        self._condition = condition
        self._failure = failure
        self._listeners: set[extend.Life] = set()
        self.count = 0

    def note(self) -> None:
        """Notes that something has changed here."""
        with self._condition:
            self.count += 1
            self._condition.notify_all()

    def hear(self, sender: extend.Life, body: bytes) -> bool:
        """Takes a message of the channel; False if it is none of these notes."""
        if body == _TELL_ME:
            with self._condition:
                self._listeners.add(sender)
        elif body == _CHANGED:
            self.note()
        return body in (_TELL_ME, _CHANGED)

    def wait(self, seen: int, seconds: float) -> None:
        """Waits until more notes than ``seen`` have come, for so long at the most.

        Raises:
            Exception: the failure, if there is one.
        """
        with self._condition:
            self._condition.wait_for(
                lambda: self.count != seen or self._failure() is not None, seconds
            )
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the error after which nothing is to be waited for, if there is one."""
        failure = self._failure()
        if failure is not None:
            raise failure

    def listen_to(self, name: str) -> None:
        """Asks another client to tell this one, too, from now on."""
        self._post(name, _TELL_ME)

    def tell(self, names: Iterable[str]) -> None:
        """Tells these clients, and all who listen to this one, that something has changed."""
        with self._condition:
            listeners = set(self._listeners)
        others: set[str | extend.Life] = {n for n in names if n != self._worker.info.name}
        for to in others.union(listeners):
            self._post(to, _CHANGED)

    def _post(self, to: str | extend.Life, body: bytes) -> None:
        with contextlib.suppress(rpc.RpcError):  # who is gone needs no news
            self._worker.post(to, self._channel, body)
