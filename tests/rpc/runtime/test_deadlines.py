"""The reading of a timeout argument, and how it meets an inherited deadline."""

from __future__ import annotations

import contextvars
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction

import pytest
import torch

from rpc.errors import RpcTimeoutError
from rpc.runtime.deadlines import cancelled, effective_timeout, enter

DEFAULT = 60.0


@dataclass
class Request:
    deadline: float = 0.0
    cancelled: bool = False


def effective(timeout: float, deadline: float = 0.0, now: float = 100.0) -> float:
    def call() -> float:
        enter(Request(deadline))
        return effective_timeout(timeout, DEFAULT, now)

    return contextvars.copy_context().run(call)


@pytest.mark.parametrize(
    ("timeout", "expected"),
    [
        (5, 5),
        (0.1, 0.1),
        (-1, DEFAULT),
        (-1.0, DEFAULT),
        (0, 0),
        (float("inf"), 0),
        (1e300, 0),
        (1e8, 1e8),
        (Decimal(2), 2.0),
        (Fraction(5, 2), 2.5),
        (torch.tensor(3), 3.0),
        (10**400, 0),
    ],
)
def test_a_timeout_is_read_as_torch_reads_it(timeout: float, expected: float):
    assert effective(timeout) == expected


@pytest.mark.parametrize("timeout", [None, "3", [1], 1j, torch.ones(2)], ids=str)
def test_what_is_no_number_is_named(timeout: object):
    with pytest.raises(TypeError, match="timeout must be a number of seconds, but got ") as refused:
        effective(timeout)  # type: ignore[arg-type]
    assert repr(timeout) in str(refused.value)


@pytest.mark.parametrize("timeout", [-(10**400), Decimal(-2)])
def test_a_number_of_any_type_that_is_no_time_is_refused_as_such(timeout: float):
    with pytest.raises(RpcTimeoutError, match="must be >= 0 seconds"):
        effective(timeout)


def test_a_default_without_limit_is_none():
    assert effective_timeout(-1.0, 0.0, 100.0) == 0
    assert effective_timeout(-1.0, float("inf"), 100.0) == 0


@pytest.mark.parametrize("timeout", [-2.0, -0.1, float("-inf"), float("nan")])
def test_what_is_no_time_fails_at_once(timeout: float):
    with pytest.raises(RpcTimeoutError, match=r"RPC ran for more than set timeout .*must be >= 0"):
        effective(timeout)


@pytest.mark.parametrize(
    ("timeout", "deadline", "expected"),
    [
        (5, 103, 3),  # what is left is less
        (5, 110, 5),  # the call's own is less
        (0, 103, 3),  # no limit of its own
        (-1, 103, 3),
        (-1, 500, DEFAULT),
    ],
)
def test_the_earlier_of_timeout_and_deadline_counts(
    timeout: float, deadline: float, expected: float
):
    assert effective(timeout, deadline) == expected


@pytest.mark.parametrize("deadline", [100.0, 99.0])
def test_a_call_whose_caller_is_out_of_time_is_not_sent(deadline: float):
    with pytest.raises(RpcTimeoutError, match="was not sent"):
        effective(5, deadline)


def test_what_is_left_never_becomes_none_by_being_tiny():
    assert effective(5, deadline=100.0 + 1e-13) > 0


def test_a_deadline_is_inherited_in_its_context_only():
    contextvars.copy_context().run(enter, Request(101.0))
    assert effective_timeout(5, DEFAULT, 100.0) == 5


def test_a_timeout_error_is_also_pythons():
    with pytest.raises(TimeoutError):
        effective(-3)


def test_a_request_is_over_when_its_time_is_or_its_caller_gave_up():
    def over(request: Request) -> bool:
        enter(request)
        return cancelled(100.0)

    for request, expected in [
        (Request(), False),
        (Request(101.0), False),
        (Request(100.0), True),
        (Request(cancelled=True), True),
    ]:
        assert contextvars.copy_context().run(over, request) is expected


def test_what_serves_no_request_is_never_cancelled():
    assert not contextvars.Context().run(cancelled, 100.0)
