"""Follows a chain of versions: the newest is made ready beside the one that is read.

A :class:`Follower` asks a :class:`Source` again and again for the way to the newest version, has
each version on it applied, and then lets readers have the result, all at once. A version that a
reader got stays as it is. If a version is missing, damaged or of another chain, readers keep what
they have, the log says why, and the follower goes on as soon as there is a way again. A
:class:`Followed` is the part of it that users hold.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar

from tensorwire.checkpoint.chain import Chain, Version
from tensorwire.checkpoint.errors import CheckpointError, NoCheckpointError, NoPublisherError

if TYPE_CHECKING:
    from typing_extensions import Self

T = TypeVar("T")

_logger: Final = logging.getLogger("tensorwire")
_PATIENCE: Final = 10.0
"""Seconds after which the log says that versions that are in use keep newer ones back."""


class Source(Protocol):
    """A place that versions come from."""

    def route(self, after: Version | None) -> Iterable[Version]:
        """The versions to apply after one, or from nothing; see :meth:`Chain.route`.

        A version is asked for when those before it have been applied.
        """

    def interrupt(self) -> None:
        """Has :meth:`route` end soon, from any thread; it is not called again."""

    def close(self) -> None:
        """Lets go of what it holds."""


class Folder:
    """The folder of a chain as a source.

    Args:
        path: of the chain. It may be made later.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path).absolute()
        self._chain: Chain | None = None

    def __str__(self) -> str:
        return str(self._path)

    def route(self, after: Version | None) -> tuple[Version, ...]:
        """See :class:`Source`."""
        self._chain = Chain.open(self._path) if self._chain is None else self._chain.again()
        return self._chain.route(after)

    def interrupt(self) -> None:
        """Does nothing: this waits for nothing anyway."""

    def close(self) -> None:
        """Does nothing: this holds nothing."""


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """A version that is ready to be read.

    Args:
        version: which.
        value: made of it.
    """

    version: Version
    value: T


class Follower(Generic[T]):
    """Keeps the newest version of a chain ready, on a thread of its own.

    Args:
        source: where versions come from; closed with this.
        take: makes the value of a version, from that of the version before if it is a delta; must
            leave the value before as it is. Called on one thread at a time.
        interval: seconds between two looks for newer versions.
        max_pinned: how many versions may be held by :meth:`pinned` at the same time, beside those
            that only a lookup uses. While as many are, newer ones wait.
    """

    def __init__(
        self,
        source: Source,
        take: Callable[[Held[T] | None, Version], T],
        interval: float,
        max_pinned: int,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"interval={interval!r}: it must be more than 0 seconds")
        if max_pinned < 1:
            raise ValueError(f"max_pinned={max_pinned!r}: at least one version must be")
        self._source = source
        self._take = take
        self._max_pinned = max_pinned
        self._changed = threading.Condition()
        self._held: Held[T] | None = None
        self._pins: dict[int, int] = {}
        self._error: Exception | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=_follow, args=(weakref.ref(self), self._closing, interval), daemon=True
        )
        self._thread.name = "tensorwire-follow"

    def start(self, timeout: float) -> None:
        """Gets the newest version, then follows.

        Args:
            timeout: seconds in which there must be a first version.

        Raises:
            CheckpointError: a version is damaged or missing.
            TimeoutError: there is no version after ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while not self._first():
            left = deadline - time.monotonic()
            if left <= 0:
                reason = f": {self._error}" if self._error else ""
                raise TimeoutError(f"{self._source} has no version after {timeout} seconds{reason}")
            self._closing.wait(min(left, 0.05))
        self._thread.start()

    def _first(self) -> bool:
        try:
            self._follow_on()
        except NoCheckpointError:
            return False
        except NoPublisherError as error:
            self._error = error  # it may not have begun
            return False
        self._error = None
        return self._held is not None

    def look(self) -> None:
        """Looks for newer versions, and takes them over. Errors are kept and logged."""
        try:
            self._follow_on()
            error: Exception | None = None
        except Exception as caught:  # what is read must never end what is served
            error = caught
        with self._changed:
            is_news = error is not None and str(error) != str(self._error)
            self._error = error
            self._changed.notify_all()
        if is_news:
            is_known = isinstance(error, (CheckpointError, OSError, MemoryError))
            _logger.warning(
                "version %s of %s is served on, as no newer one can be taken over: %s",
                self.held.version.number, self._source, error,
                exc_info=None if is_known else error,
            )  # fmt: skip
        if error is not None:
            error.with_traceback(None)  # whose frames hold versions

    def _follow_on(self) -> None:
        way = self._source.route(self._held.version if self._held else None)
        for version in way:
            try:
                if not self._may_go_on(version):
                    return
                value = self._take(self._held, version)
            except CheckpointError:
                if version.folder.exists():
                    raise
                return  # removed meanwhile, as a newer base is there
            with self._changed:
                self._held = Held(version, value)
                self._changed.notify_all()

    def _may_go_on(self, version: Version) -> bool:
        """Waits while too many versions are pinned; False if this is closed."""
        began, said = time.monotonic(), False
        with self._changed:
            while not self._closing.is_set() and len(self._pins) >= self._max_pinned:
                self._changed.wait(1.0)
                if not said and time.monotonic() - began > _PATIENCE:
                    said = True
                    _logger.warning(
                        "version %d of %s waits: versions %s are pinned, and max_pinned=%d",
                        version.number, self._source, sorted(self._pins), self._max_pinned,
                    )  # fmt: skip
        return not self._closing.is_set()

    @property
    def held(self) -> Held[T]:
        """The newest version that is ready."""
        if self._held is None:
            raise RuntimeError("no version has been taken over yet")
        return self._held

    @property
    def error(self) -> Exception | None:
        """The reason for which newer versions are not taken over; None if there is none."""
        return self._error

    @contextmanager
    def pinned(self) -> Iterator[Held[T]]:
        """Holds the version that is the newest now."""
        with self._changed:
            held = self.held
            number = held.version.number
            self._pins[number] = self._pins.get(number, 0) + 1
        try:
            yield held
        finally:
            with self._changed:
                self._pins[number] -= 1
                if not self._pins[number]:
                    del self._pins[number]
                self._changed.notify_all()

    def wait_for(self, version: int | None, step: int | None, timeout: float | None) -> None:
        """Waits until a version, or one of a step, or a later one, is ready.

        Raises:
            TimeoutError: none is after ``timeout`` seconds.
            ValueError: neither or both of ``version`` and ``step`` are given.
        """
        if (version is None) == (step is None):
            raise ValueError(f"wait_for(version={version!r}, step={step!r}): give one of them")

        def there() -> bool:
            latest = self.held.version
            number, wanted = (latest.step, step) if version is None else (latest.number, version)
            return self._closing.is_set() or (wanted is not None and number >= wanted)

        with self._changed:
            if not self._changed.wait_for(there, timeout):
                latest = self.held.version
                reason = f": {self._error}" if self._error else ""
                raise TimeoutError(
                    f"{self._source} has version {latest.number} (step {latest.step}) after "
                    f"{timeout} seconds{reason}"
                )
            if self._closing.is_set():
                raise RuntimeError(f"{self._source} is not followed any more")

    def close(self) -> None:
        """Follows no more; what readers hold stays."""
        with self._changed:
            self._closing.set()
            self._changed.notify_all()
        self._source.interrupt()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join()
        self._source.close()


class Followed(Generic[T]):
    """A published state as whoever reads it holds it: how old it is, and waiting for newer ones.

    May be used by several threads. Used as a context manager, it is closed at the end.
    """

    def __init__(self, follower: Follower[T]) -> None:
        self._follower = follower

    @property
    def age(self) -> float:
        """Seconds since the newest version was published, by the clocks of both machines."""
        return max(0.0, time.time() - self._follower.held.version.time)

    @property
    def error(self) -> Exception | None:
        """The reason for which newer versions are not taken over; None if there is none."""
        return self._follower.error

    def wait_for(
        self,
        version: int | None = None,
        *,
        step: int | None = None,
        timeout: float | None = None,
    ) -> None:
        """Waits for a version, or one of a step, or later ones.

        Args:
            version: its number.
            step: of the training. One of the two is given.
            timeout: seconds; default none.

        Raises:
            RuntimeError: this is closed meanwhile.
            TimeoutError: it is not there after ``timeout`` seconds; says what keeps it back.
            ValueError: neither or both of ``version`` and ``step`` are given.
        """
        self._follower.wait_for(version, step, timeout)

    def close(self) -> None:
        """Follows no more; what it has can be read on."""
        self._follower.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def begun(
    source: Source,
    take: Callable[[Held[T] | None, Version], T],
    interval: float,
    max_pinned: int,
    timeout: float,
) -> Follower[T]:
    """A follower that has the newest version.

    Args:
        source: see :class:`Follower`; closed if this fails.
        take: see :class:`Follower`.
        interval: see :class:`Follower`.
        max_pinned: see :class:`Follower`.
        timeout: seconds in which there must be a first version.

    Raises:
        CheckpointError: a version is damaged or missing.
        TimeoutError: there is no version after ``timeout`` seconds.
        ValueError: an argument is out of range.
    """
    try:
        follower = Follower(source, take, interval, max_pinned)
        follower.start(timeout)
    except BaseException:
        source.interrupt()
        source.close()
        raise
    return follower


def _follow(follower: weakref.ref[Follower[T]], closing: threading.Event, interval: float) -> None:
    """Looks for versions until the follower is closed, or nobody has it any more."""
    while not closing.wait(interval):
        here = follower()
        if here is None:
            return
        here.look()
        del here
