"""A snapshot that is being written, while training goes on."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.decisions.views import Snapshot


class Saving:
    """A snapshot that is being written. Made by ``Cluster.snapshot``."""

    def __init__(self, take: Callable[[], Snapshot]) -> None:
        self._error: BaseException | None = None
        self._snapshot: Snapshot | None = None
        context = contextvars.copy_context()  # of this worker
        self._thread = threading.Thread(
            target=context.run, args=(self._run, take), name="tensorwire-ps", daemon=True
        )
        self._thread.start()

    def _run(self, take: Callable[[], Snapshot]) -> None:
        try:
            self._snapshot = take()
        except BaseException as error:
            self._error = error

    def wait(self, timeout: float | None = None) -> Snapshot:
        """Waits until the snapshot is whole, and on disk.

        Args:
            timeout: seconds; default none.

        Returns:
            Where it is (``folder``), and how many pushes are in it (``counts``) of each trainer,
            by its number (``Cluster.number``).

        Raises:
            SnapshotError: it could not be written.
            TimeoutError: it takes longer.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the snapshot was not written in {timeout} seconds")
        if isinstance(self._error, errors.ParameterServerError):
            raise errors.SnapshotError(str(self._error)) from self._error
        if self._error is not None:
            raise self._error
        assert self._snapshot is not None
        return self._snapshot

    def done(self) -> bool:
        """True once :meth:`wait` would return, or raise, at once."""
        return not self._thread.is_alive()
