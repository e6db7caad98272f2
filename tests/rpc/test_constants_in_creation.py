"""A small value that can never change comes with the news that ``remote()`` made it."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest

from rpc.errors import RpcTimeoutError, RRefCreationError
from rpc.testing import local_group


def same(value):
    return value


class Gate:
    """Lets :func:`wait_if` go on."""

    open = threading.Event()


def wait_if(closed):
    if closed:
        assert Gate.open.wait(20)
    return 1


class Held:
    """The state that handlers of this module wait for and change."""

    items: ClassVar[list[int]] = []


def shared_list():
    return Held.items


@pytest.fixture
def fetches(make_transport):
    """Counts what ``to_here`` asks of the owner."""
    with local_group("alice", "bob", transport=make_transport) as (alice, bob):

        def count() -> int:
            rows = alice.metrics().made
            return sum(row.calls for row in rows if row.method == "to_here")

        yield alice, bob, count


@pytest.mark.parametrize(
    "value", [None, True, 7, -(2**70), 2.5, "text", b"bytes", "x" * 1024, ""], ids=repr
)
def test_constants_are_the_same_however_they_come(fetches, value):
    alice, _, _ = fetches
    for _ in range(3):
        got = alice.remote("bob", same, (value,)).to_here()
        assert got == value
        assert type(got) is type(value)


def test_once_a_function_made_a_constant_its_next_one_is_not_asked_for(fetches):
    alice, _, count = fetches
    first = alice.remote("bob", same, (1,))
    assert first.to_here() == 1
    first._get_future().wait()
    before = count()
    assert alice.remote("bob", same, (2,)).to_here() == 2
    assert first.to_here() == 1
    assert count() == before


@pytest.mark.parametrize("value", ["x" * 1025, [1], (1, [2]), {"a": 1}, 2**9000], ids=type)
def test_what_is_large_or_may_change_is_asked_for(fetches, value):
    alice, _, count = fetches
    for _ in range(2):
        before = count()
        rref = alice.remote("bob", same, (value,))
        rref._get_future().wait()
        assert rref.to_here() == value
        assert count() == before + 1


def test_changes_of_a_value_are_seen(fetches):
    alice, _, _ = fetches
    Held.items = [1]
    rref = alice.remote("bob", shared_list)
    assert rref.to_here() == [1]
    Held.items.append(2)
    assert rref.to_here() == [1, 2]


def test_a_function_that_fails_after_it_made_constants_raises_its_error(fetches):
    alice, _, _ = fetches

    def sometimes(fail: bool) -> int:
        if fail:
            raise ValueError("no value")
        return 1

    first = alice.remote("bob", sometimes, (False,))
    first._get_future().wait()
    with pytest.raises(ValueError, match="no value"):
        alice.remote("bob", sometimes, (True,)).to_here()


def test_a_creation_that_times_out_ends_the_wait_for_its_constant(fetches):
    alice, _, _ = fetches
    Gate.open.clear()
    alice.remote("bob", wait_if, (False,))._get_future().wait()
    rref = alice.remote("bob", wait_if, (True,), timeout=0.1)
    with pytest.raises((RRefCreationError, RpcTimeoutError)):
        rref.to_here()
    Gate.open.set()


def test_a_wait_shorter_than_the_creation_times_out_on_its_own(fetches):
    alice, _, _ = fetches
    Gate.open.clear()
    alice.remote("bob", wait_if, (False,))._get_future().wait()
    rref = alice.remote("bob", wait_if, (True,), timeout=20)
    with pytest.raises(RpcTimeoutError):
        rref.to_here(timeout=0.1)
    Gate.open.set()
    assert rref.to_here() == 1


@pytest.mark.parametrize(
    ("timeout", "error"), [("soon", TypeError), (-3.0, RpcTimeoutError), (None, TypeError)]
)
def test_a_timeout_that_is_none_is_refused_though_the_value_is_here(timeout, error):
    with local_group("a", "b") as (a, _):
        rref = a.remote("b", same, (3,))
        assert rref.to_here() == rref.to_here(timeout=5) == 3
        with pytest.raises(error, match="timeout must be"):
            rref.to_here(timeout=timeout)
