"""Errors of futures that nobody looks at are logged, and futures are freed with their errors."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import weakref
from collections.abc import Callable

import pytest
import torch

from rpc.errors import CallCancelledError, RpcTimeoutError
from rpc.outcomes.futures import Future
from tests.rpc.outcomes.futures import (
    Refused,
    awaited,
    done,
    failed,
    messages,
    refuse,
)


def test_an_error_that_nobody_looked_at_is_logged_when_its_future_is_collected(
    caplog: pytest.LogCaptureFixture,
):
    error = ValueError("no")
    failed(error)
    assert messages(caplog) == ["the call of f on w1 failed and nobody looked: ValueError: no"]
    (record,) = caplog.records
    assert isinstance(record.args, tuple)
    assert error not in record.args  # who keeps records is not to keep its frames


def test_a_timeout_that_nobody_looked_at_is_logged_with_its_type_once(
    caplog: pytest.LogCaptureFixture,
):
    failed(RpcTimeoutError("late"))
    assert messages(caplog) == [
        "the call of f on w1 failed and nobody looked: RpcTimeoutError: late"
    ]


def test_the_end_of_a_call_that_was_given_up_is_no_news(caplog: pytest.LogCaptureFixture):
    def give_up(future: Future[int]) -> bool:
        future.set_exception(CallCancelledError("given up"))
        return True

    future: Future[int] = Future(canceller=give_up)
    assert future.cancel()
    del future
    assert messages(caplog) == []


def test_an_unseen_error_is_logged_although_a_waiting_caller_died(
    caplog: pytest.LogCaptureFixture,
):
    future: Future[int] = Future(description="the call")
    assert future.complete_unless_watched(None, ValueError("no"), refuse)
    del future
    assert messages(caplog) == ["the call failed and nobody looked: ValueError: no"]


LOOKS: dict[str, Callable[[Future], object]] = {
    "wait": lambda f: f.wait(),
    "value": lambda f: f.value(),
    "then": lambda f: f.then(lambda _: None),
    "callback": lambda f: f.add_done_callback(lambda _: None),
    "await": lambda f: asyncio.run(awaited(f)),
    "wait_all": lambda f: torch.futures.wait_all([f]),
    "collect_all": lambda f: torch.futures.collect_all([f]).wait(),
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_an_error_that_somebody_looked_at_is_not_logged(
    look: Callable[[Future], object], caplog: pytest.LogCaptureFixture
):
    future = failed(ValueError("no"))
    with contextlib.suppress(ValueError):
        look(future)
    del future
    assert messages(caplog) == []


def test_an_error_that_a_callback_was_waiting_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
):
    future: Future[int] = Future()
    future.add_done_callback(lambda _: None)
    future.set_exception(ValueError("no"))
    del future
    assert messages(caplog) == []


def test_only_the_last_of_a_chain_is_logged(caplog: pytest.LogCaptureFixture):
    future: Future[int] = Future(description="the call")
    chain = future.then(lambda f: f.wait())
    future.set_exception(RuntimeError("no"))
    del future, chain
    assert messages(caplog) == ["a callback on the call failed and nobody looked: RuntimeError: no"]


def test_a_result_is_not_logged(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        done()
        assert messages(caplog) == []


# --- Memory


def test_a_future_is_freed_when_its_last_reference_is_dropped():
    future: Future[object] = Future()
    child = future.then(lambda f: f.wait())
    future.set_result(object())
    child.wait()
    dead = [weakref.ref(future), weakref.ref(child)]
    del future, child
    assert [ref() for ref in dead] == [None, None]


def test_a_failed_future_is_freed_although_its_error_knows_the_frames_it_was_raised_in():
    def wait(future: Future[int]) -> None:
        future.wait()

    future = failed(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        wait(future)
    dead = weakref.ref(future)
    del future
    gc.collect(1)
    assert dead() is None


def test_a_waited_for_failure_is_freed_without_the_garbage_collector():
    gc.collect(1)
    gc.disable()
    try:
        future = failed(ValueError("no"))
        dead = weakref.ref(future)
        with contextlib.suppress(ValueError):
            future.wait()
        del future
        assert dead() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "error", [ValueError("no"), Refused(3, hint="h"), OSError(2, "gone"), RpcTimeoutError("late")]
)
def test_who_collected_futures_gets_their_error_although_they_are_gone(error: Exception):
    future = failed(error)
    both = torch.futures.collect_all([done(), future])
    text = str(error)
    del future
    gc.collect(1)
    for _ in range(2):
        with pytest.raises(type(error)) as raised:
            both.wait()
        assert str(raised.value) == text


def test_an_error_that_cannot_be_copied_is_told_in_words_when_its_future_is_gone():
    class Odd(Exception):
        def __new__(cls, *args: object) -> Odd:
            if args != (1, 2):
                raise TypeError("no")
            return super().__new__(cls)

        def __str__(self) -> str:
            return "odd"

    error = Odd(1, 2)
    error.args = ()
    future = failed(error)
    both = torch.futures.collect_all([future])
    del future
    with pytest.raises(RuntimeError, match="Odd: odd"):
        both.wait()


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("is_done", [True, False])
def test_an_error_of_a_callback_fails_its_future_although_it_has_no_text(is_done: bool) -> None:
    def fail(_: object) -> None:
        raise Speechless("why")

    future = done(3) if is_done else Future()
    child = future.then(fail)
    if not is_done:
        future.set_result(3)
    assert child.done()
    with pytest.raises(Speechless):
        child.wait()


def test_a_failure_that_nobody_looks_at_is_logged_although_it_has_no_text(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failed(Speechless("why"))
    gc.collect()
    assert "failed and nobody looked: Speechless: <tests.rpc" in caplog.text
