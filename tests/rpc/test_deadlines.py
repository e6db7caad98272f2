"""How a timeout argument is read, and how it meets an inherited deadline."""

from __future__ import annotations

import contextvars

import pytest

from rpc.deadlines import effective_timeout, inherit
from rpc.errors import RpcTimeoutError

DEFAULT = 60.0


def effective(timeout: float, deadline: float = 0.0, now: float = 100.0) -> float:
    def call() -> float:
        inherit(deadline)
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
    ],
)
def test_a_timeout_is_read_as_torch_reads_it(timeout: float, expected: float):
    assert effective(timeout) == expected


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
    contextvars.copy_context().run(inherit, 101.0)
    assert effective_timeout(5, DEFAULT, 100.0) == 5


def test_a_timeout_error_is_also_pythons():
    with pytest.raises(TimeoutError):
        effective(-3)
