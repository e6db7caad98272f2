"""Decides when a call is tried again, and sees to it that none runs twice. Sans-IO.

At the caller, :class:`Attempts` says how long each attempt may take and when the next
begins. At the receiver, :class:`IdempotencyTable` recognises a request that came before: one
that still runs gets one more waiter, one that ended is answered with the same outcome.

An entry of the table is kept while its caller may try again: until a later request of
that caller says so (each names the oldest that is still open), until the time of the
whole call is over, or until the caller is lost. An attempt that arrives after its entry
was let go, for requests may overtake each other, is recognised by its number.
"""

from __future__ import annotations

import enum
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Final, Generic, TypeVar

from rpc.errors import FrameError

_ID: Final = struct.Struct("<QQd")
_KEPT_WITHOUT_LIMIT: Final = 3600.0
_MIN_SECONDS: Final = 1e-3
_ABSENT_SECONDS: Final = 0.05

W = TypeVar("W")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Retry:
    """Says how a call, or the creation of a value, is tried again when it takes too long.

    Also when the worker was lost, but for ``remote()``.

    Only for functions marked with :func:`rpc.functions.idempotent`. A request that
    reaches the same life of a worker twice still runs once; in a later life of the
    worker it may run again. Each attempt sends the arguments as they are then: leave
    lists and tensors alone until the call is over.

    Args:
        attempts: how many there are at most, 1 or more. Default 3.
        backoff: seconds before the second attempt. Default 0.1. While the worker is not
            there, at least 0.05 pass before it is looked for again.
        factor: by how much the pause grows with each further one. Default 2.
        attempt_timeout: seconds each attempt may take; default an equal share of what is
            left of the call's timeout.

    Raises:
        TypeError: an argument is no number, or ``attempts`` no whole one.
        ValueError: a number is out of range, or ``backoff`` or ``factor`` not finite.

    Example::

        rpc.rpc_sync("server", fetch, (key,), timeout=30, retry=rpc.Retry(attempts=5))
    """

    attempts: int = 3
    backoff: float = 0.1
    factor: float = 2.0
    attempt_timeout: float | None = None

    def __post_init__(self) -> None:
        _require_number("attempts", self.attempts, Integral, "a whole number")
        _require_number("backoff", self.backoff, Real, "a number of seconds")
        _require_number("factor", self.factor, Real, "a number")
        if self.attempt_timeout is not None:
            _require_number("attempt_timeout", self.attempt_timeout, Real, "a number of seconds")
        _require_finite("backoff", self.backoff)
        _require_finite("factor", self.factor)
        if self.attempts < 1 or not self.backoff >= 0 or not self.factor >= 1:
            raise ValueError(f"{self}: attempts and factor must be 1 or more, backoff 0 or more")
        if self.attempt_timeout is not None and not self.attempt_timeout > 0:
            raise ValueError(f"{self}: attempt_timeout must be above 0")


def _require_number(argument: str, value: object, kind: type[object], wanted: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise TypeError(f"Retry: {argument}={value!r} is a {type(value).__name__}, not {wanted}")


def _require_finite(argument: str, value: float) -> None:
    try:
        finite = math.isfinite(value)
    except OverflowError:  # a whole number, or a fraction, that no float can be
        finite = False
    if not finite:
        raise ValueError(f"Retry: {argument}={value!r} must be finite")


class Attempts:
    """The attempts at one call. Times are seconds on any monotonic clock.

    Args:
        retry: what the user wants.
        now: when the call was made.
        timeout: seconds the whole call may take, 0 for no limit.
    """

    def __init__(self, retry: Retry, now: float, timeout: float) -> None:
        self._retry = retry
        self._deadline = now + timeout if timeout else 0.0
        self._made = 0
        self._pauses = 0
        self._pause = retry.backoff
        self._is_absent = False

    def seconds_left(self, now: float) -> float:
        """Returns the seconds that are left for the whole call; 0 for no limit."""
        return max(self._deadline - now, _MIN_SECONDS) if self._deadline else 0.0

    def begin(self, now: float) -> float:
        """Begins an attempt; returns the seconds it may take, 0 for no limit."""
        left = self.seconds_left(now)
        share = left / max(1, self._retry.attempts - self._made)
        self._made += 1
        self._is_absent = False
        own = self._retry.attempt_timeout
        if own is None:
            return share
        return min(own, left) if left else own

    def not_sent(self) -> None:
        """Uncounts the attempt that began, as its worker is not there."""
        self._made -= 1
        self._is_absent = True

    def next_after(self, now: float) -> float | None:
        """Takes an attempt's failure; returns when the next begins, None if there is none."""
        pause = max(self._pause, _ABSENT_SECONDS) if self._is_absent else self._pause
        begins = now + pause
        if self._made >= self._retry.attempts or (self._deadline and not begins < self._deadline):
            return None
        if self._made == 0 and not self._deadline and self._pauses >= self._retry.attempts:
            return None
        self._pauses += 1
        self._pause *= self._retry.factor
        return begins


@dataclass(frozen=True, slots=True)
class RequestId:
    """The number that a request carries which may be repeated.

    Args:
        number: the same in every attempt; its caller's numbers rise.
        oldest: the caller's oldest call of this kind that is not over.
        seconds: how long the caller may still try again; 0 for no limit.
    """

    number: int
    oldest: int
    seconds: float

    def encode(self) -> bytes:
        """Returns it as bytes for a request's target."""
        return _ID.pack(self.number, self.oldest, self.seconds)

    @classmethod
    def decode(cls, data: bytes) -> RequestId:
        """Reads what :meth:`encode` wrote.

        Raises:
            FrameError: ``data`` is anything else.
        """
        try:
            return cls(*_ID.unpack(data))
        except struct.error:
            raise FrameError(f"a request id of {len(data)} bytes") from None


class Verdict(enum.Enum):
    """Verdicts on a request that arrived."""

    RUN = enum.auto()
    WAIT = enum.auto()
    """The request runs already, and its outcome will be handed to this one too."""
    REPEAT = enum.auto()
    """The request ran, and is answered with its outcome."""
    OVER = enum.auto()
    """The request came so long ago that nobody waits for an outcome any more."""


@dataclass(slots=True)
class _IdempotentCall(Generic[W, R]):
    keep_until: float
    waiters: list[W] = field(default_factory=list)
    outcome: R | None = None

    def is_over(self, caller_is_done: bool, now: float) -> bool:
        return self.outcome is not None and (caller_is_done or self.keep_until <= now)


@dataclass(slots=True)
class _Caller(Generic[W, R]):
    oldest: int = 0
    entries: dict[int, _IdempotentCall[W, R]] = field(default_factory=dict)
    let_go: set[int] = field(default_factory=set)

    def clear(self, request: RequestId, now: float) -> list[R]:
        """Lets go of outcomes that no further attempt can ask for; returns them."""
        self.oldest = max(self.oldest, request.oldest)
        over = [n for n, entry in self.entries.items() if entry.is_over(n < self.oldest, now)]
        outcomes = self._forget([number for number in over if number != request.number])
        self.let_go = {number for number in self.let_go if number >= self.oldest}
        return outcomes

    def expire(self, now: float) -> list[R]:
        """Lets go of outcomes whose time is over; returns them."""
        return self._forget([n for n, entry in self.entries.items() if entry.is_over(False, now)])

    def outcomes(self) -> list[R]:
        """The outcomes that are kept."""
        return [e.outcome for e in self.entries.values() if e.outcome is not None]

    def _forget(self, numbers: Sequence[int]) -> list[R]:
        self.let_go.update(numbers)
        gone = [self.entries.pop(number).outcome for number in numbers]
        return [outcome for outcome in gone if outcome is not None]

    def is_late(self, number: int) -> bool:
        return number < self.oldest or number in self.let_go


class IdempotencyTable(Generic[W, R]):
    """The requests that may come again; ``W`` waits for an outcome of type ``R``.

    Outcomes that are let go of are returned, for their end may run code.
    """

    def __init__(self) -> None:
        self._callers: dict[int, _Caller[W, R]] = {}

    def __len__(self) -> int:
        return sum(len(caller.entries) for caller in self._callers.values())

    def arrived(
        self, sender: int, request: RequestId, waiter: W, now: float
    ) -> tuple[Verdict, R | None, list[R]]:
        """Takes a request; says what to do, and with :attr:`Verdict.REPEAT` its outcome.

        Last come the outcomes that are let go of, as it tells that nobody will ask for them.
        """
        caller = self._callers.setdefault(sender, _Caller())
        let_go = caller.clear(request, now)
        keep_until = now + (request.seconds or _KEPT_WITHOUT_LIMIT)
        entry = caller.entries.get(request.number)
        if entry is None:
            if caller.is_late(request.number):
                return Verdict.OVER, None, let_go
            caller.entries[request.number] = _IdempotentCall(keep_until, [waiter])
            return Verdict.RUN, None, let_go
        entry.keep_until = max(entry.keep_until, keep_until)
        if entry.outcome is not None:
            return Verdict.REPEAT, entry.outcome, let_go
        entry.waiters.append(waiter)
        return Verdict.WAIT, None, let_go

    def ended(self, sender: int, number: int, ran: W, outcome: R) -> list[W]:
        """Takes the outcome of a request that ran; returns all who wait for it.

        Nobody does if ``ran`` is of a life of the caller that is over.
        """
        caller = self._callers.get(sender)
        entry = caller and caller.entries.get(number)
        if not entry or ran not in entry.waiters:
            return []
        entry.outcome = outcome
        waiters, entry.waiters = entry.waiters, []
        return waiters

    def expire(self, now: float) -> list[R]:
        """Lets go of outcomes whose time is over; for when no request comes that would."""
        return [outcome for caller in self._callers.values() for outcome in caller.expire(now)]

    def worker_lost(self, sender: int) -> list[R]:
        """Forgets a caller that is gone; in its next life it counts anew."""
        caller = self._callers.pop(sender, None)
        return [] if caller is None else caller.outcomes()
