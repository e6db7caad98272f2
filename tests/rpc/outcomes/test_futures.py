"""The rules for futures, checked against torch's own where torch says it."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import threading
from collections.abc import Callable
from typing import NoReturn

import pytest
import torch

from rpc.errors import RemoteError
from rpc.outcomes import collecting
from rpc.outcomes.futures import Future
from rpc.runtime.executor import Executor
from tests.rpc.outcomes.futures import (
    SECONDS,
    Refused,
    awaited,
    done,
    failed,
    messages,
    refuse,
)
from tests.waiting import until

# --- As torch's


def test_it_is_a_torch_future():
    assert isinstance(Future(), torch.futures.Future)
    assert isinstance(Future(), torch._C.Future)
    assert isinstance(Future().then(lambda _: None), Future)


def test_a_result_is_what_was_set():
    value = object()
    future: Future[object] = Future()
    assert not future.done()
    future.set_result(value)
    assert future.done()
    assert future.wait() is value
    assert future.value() is value


def test_wait_blocks_until_another_thread_sets_the_result():
    future: Future[int] = Future()
    setter = threading.Thread(target=future.set_result, args=(3,))
    setter.start()
    assert future.wait() == 3
    setter.join()


@pytest.mark.parametrize(
    "error", [ValueError("no"), Refused(3, hint="h"), KeyError("k"), asyncio.CancelledError()]
)
def test_an_error_keeps_its_type_and_identity_however_often_it_is_raised(error: BaseException):
    future = failed(error)
    for get in (future.wait, future.wait, future.value):
        with pytest.raises(type(error)) as raised:
            get()
        assert raised.value is error


def test_what_is_no_exception_cannot_be_set_as_one():
    with pytest.raises(TypeError, match="needs an exception"):
        Future().set_exception("no")  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [done, lambda: failed(ValueError("first"))])
@pytest.mark.parametrize(
    "again", [lambda f: f.set_result(1), lambda f: f.set_exception(KeyError("second"))]
)
def test_a_future_is_completed_once(
    first: Callable[[], Future], again: Callable[[Future], None], caplog: pytest.LogCaptureFixture
):
    future = first()
    with pytest.raises(RuntimeError, match="Future can only be marked completed once"):
        again(future)
    if first is done:
        assert future.wait() == 7
    else:
        with pytest.raises(ValueError, match="first"):
            future.wait()
    del future
    gc.collect(1)
    assert not messages(caplog)


def test_all_that_wait_are_let_go_before_callbacks_are_over():
    future: Future[int] = Future()
    held, end = threading.Event(), threading.Event()
    found: list[int] = []

    def hold(_: object) -> None:
        held.set()
        end.wait(SECONDS)

    future.add_done_callback(hold)
    waiting = [threading.Thread(target=lambda: found.append(future.wait())) for _ in range(3)]
    completing = threading.Thread(target=future.set_result, args=(7,))
    for thread in [*waiting, completing]:
        thread.start()
    assert held.wait(SECONDS)
    for thread in waiting:
        thread.join(SECONDS)
    assert found == [7, 7, 7]
    end.set()
    completing.join()


@pytest.mark.parametrize("hang", ["then", "add_done_callback"])
def test_a_callback_that_was_hung_just_before_completion_holds_up_nobody_who_waits(
    hang: str,
) -> None:
    future: Future[int] = Future()
    waiting = threading.Thread(target=future.wait, daemon=True)
    waiting.start()
    until(lambda: future._gate is not None)
    held_up: list[bool] = []

    def join(_: object) -> None:
        waiting.join(SECONDS)
        held_up.append(waiting.is_alive())

    getattr(future, hang)(join)
    # The part of set_result that follows the look at whether there are callbacks.
    completing = threading.Thread(target=torch._C.Future.set_result, args=(future, 7), daemon=True)
    completing.start()
    completing.join(2 * SECONDS)
    assert held_up == [False]


def test_the_value_of_a_future_that_is_not_done_is_an_error_that_says_so():
    with pytest.raises(RuntimeError, match="the call of f is not done"):
        Future(description="the call of f").value()


@pytest.mark.parametrize("method", ["then", "add_done_callback"])
def test_a_callback_that_cannot_be_called_is_refused_as_torch_refuses_it(method: str):
    for future in (Future(), torch.futures.Future()):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            getattr(future, method)(None)


# --- Callbacks


@pytest.mark.parametrize("early", [True, False])
def test_callbacks_get_the_future_itself(early: bool):
    seen: list[object] = []
    future: Future[int] = Future()
    if early:
        future.set_result(4)
    future.add_done_callback(seen.append)
    child = future.then(lambda f: (seen.append(f), f.wait() + 1)[1])
    if not early:
        future.set_result(4)
    assert child.wait() == 5
    assert seen[0] is future
    assert seen[1] is future


def test_chains_pass_values_on():
    future: Future[int] = Future()
    chain = future.then(lambda f: f.wait() + 1).then(lambda f: f.wait() * 2)
    future.set_result(1)
    assert chain.wait() == 4


def test_an_error_passes_through_a_chain_as_itself():
    error = RuntimeError("at the start")
    future: Future[int] = Future()
    chain = future.then(lambda f: f.wait()).then(lambda f: f.wait())
    future.set_exception(error)
    with pytest.raises(RuntimeError) as raised:
        chain.wait()
    assert raised.value is error


@pytest.mark.parametrize("error", [ValueError("in it"), Refused(3, hint="h")])
def test_an_error_of_a_callback_comes_out_of_the_chain_as_its_type_and_as_runtime_error(
    error: BaseException,
):
    def fail(_: object) -> None:
        raise error

    child = done().then(fail)
    with pytest.raises(RuntimeError) as raised:
        child.wait()
    assert isinstance(raised.value, type(error))
    assert str(raised.value) == str(error)
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt("now"), SystemExit(0), asyncio.CancelledError()]
)
def test_a_callback_that_would_end_the_thread_fails_the_chain_with_a_remote_error(
    error: BaseException,
):
    def leave(_: object) -> None:
        raise error

    with pytest.raises(RemoteError, match=type(error).__name__) as raised:
        done().then(leave).wait()
    assert not isinstance(raised.value, type(error))
    assert raised.value.__cause__ is error


def insist(*_: object) -> NoReturn:
    raise SystemExit("no")


class Immutable(Exception):
    __setattr__ = insist


class WithoutArguments(Exception):
    args = property(insist)


class WithoutCause(Exception):
    __cause__ = property(insist, insist)


class WithoutAttributes(Exception):
    __getattribute__ = insist


class Final(Exception):
    def __init_subclass__(cls) -> None:
        insist()


class Interrupt(KeyboardInterrupt):
    __setattr__ = insist
    args = property(insist)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Immutable, Immutable),
        (WithoutArguments, RemoteError),
        (WithoutCause, WithoutCause),
        (WithoutAttributes, RemoteError),
        (Final, RemoteError),
        (Interrupt, RemoteError),
    ],
)
def test_a_callback_whose_error_does_not_let_itself_be_asked_or_told_fails_the_chain(
    kind: type[BaseException], told: type[Exception]
) -> None:
    def fail(_: object) -> None:
        raise kind("the reason")

    child = done().then(fail)
    assert child.done()
    with pytest.raises(RuntimeError) as raised:
        child.wait()
    assert isinstance(raised.value, told)
    assert kind.__name__ in repr(raised.value) or kind.__name__ in str(raised.value)
    assert type(vars(BaseException)["__cause__"].__get__(raised.value)) is kind


class Nameless(type):
    def __getattribute__(cls, name: str) -> NoReturn:
        insist()


def test_an_error_of_a_class_that_tells_nothing_is_logged_if_nobody_looked(
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind = Nameless("Mute", (RuntimeError,), {"__new__": insist})
    failed(RuntimeError.__new__(kind, "the reason"))
    (message,) = messages(caplog)
    assert "Mute" in message


def test_completion_that_would_run_callbacks_is_left_to_another_thread():
    future: Future[int] = Future()
    future.add_done_callback(lambda _: None)
    assert not future.complete_unless_watched(1, None, refuse)
    assert not future.done()
    future.set_result(1)


def test_completion_that_runs_no_callbacks_happens_at_once():
    future: Future[int] = Future()
    assert future.complete_unless_watched(1, None, refuse)
    assert future.wait() == 1
    future = Future()
    assert future.complete_unless_watched(None, ValueError("no"), refuse)
    with pytest.raises(ValueError, match="no"):
        future.wait()


def test_complete_from_takes_a_value_or_an_error():
    future: Future[int] = Future()
    future.complete_from(lambda: 3)
    assert future.wait() == 3
    future = Future()
    future.complete_from(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        future.wait()


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_complete_from_fails_the_future_with_what_would_end_a_thread(error: BaseException) -> None:
    def leave() -> int:
        raise error

    future: Future[int] = Future()
    future.complete_from(leave)
    with pytest.raises(RemoteError, match=type(error).__name__):
        future.wait()


# --- Together


def test_collect_all_waits_for_all_and_hands_out_the_futures():
    futures: list[Future[int]] = [Future(), Future()]
    both = torch.futures.collect_all(futures)
    futures[1].set_result(1)
    assert not both.done()
    futures[0].set_result(0)
    assert [future.wait() for future in both.wait()] == [0, 1]


def test_wait_all_returns_the_values_in_order():
    futures: list[Future[int]] = [Future() for _ in range(3)]
    for number in (2, 0, 1):
        futures[number].set_result(number)
    assert torch.futures.wait_all(futures) == [0, 1, 2]


def test_wait_all_raises_the_error_itself():
    error = Refused(3, hint="h")
    with pytest.raises(Refused) as raised:
        torch.futures.wait_all([done(), failed(error)])
    assert raised.value is error


def test_a_finalizer_may_fail_a_future_while_another_looks_for_who_waits_for_it() -> None:
    together = [collecting.collect_all([Future()]) for _ in range(20)]
    rng = random.Random(1)
    failures: list[object] = []

    def fail_seen() -> None:
        future: Future[int] = Future()
        future.add_done_callback(failures.append)
        future.set_exception(ValueError("no"))

    class Garbage:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            fail_seen()

    def fail_among_garbage() -> None:
        for _ in range(500):
            Garbage()
            gc.set_threshold(rng.randrange(1, 60))  # to be collected now here, now there
            fail_seen()

    before = gc.get_threshold()
    failing = threading.Thread(target=fail_among_garbage, daemon=True)
    try:
        failing.start()
        failing.join(SECONDS)
    finally:
        gc.set_threshold(*before)
    assert not failing.is_alive()
    assert len(failures) > 500
    assert not any(each.done() for each in together)


# --- Awaiting


def test_a_future_can_be_awaited():
    future: Future[int] = Future()
    setters = threading.Thread(target=future.set_result, args=(5,))

    async def main() -> tuple[int, int]:
        setters.start()
        return await future, await done(6)

    assert asyncio.run(main()) == (5, 6)
    setters.join()


def test_awaiting_does_not_block_the_loop():
    future: Future[int] = Future()

    async def complete() -> None:
        future.set_result(1)

    async def main() -> int:
        waiting = asyncio.ensure_future(awaited(future))
        await complete()
        return await waiting

    assert asyncio.run(main()) == 1


def test_an_awaited_error_is_raised_in_the_coroutine(caplog: pytest.LogCaptureFixture):
    error = ValueError("no")
    with pytest.raises(ValueError, match="no") as raised:
        asyncio.run(awaited(failed(error)))
    assert raised.value is error
    gc.collect(1)
    assert not messages(caplog)


def test_a_cancelled_await_leaves_the_future_alone():
    future: Future[int] = Future()

    async def main() -> None:
        task = asyncio.ensure_future(awaited(future))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        future.set_result(1)
        await asyncio.sleep(0)

    asyncio.run(main())
    assert future.wait() == 1


def test_a_future_may_complete_after_the_loop_that_awaited_it_was_closed(
    capfd: pytest.CaptureFixture[str],
):
    future: Future[int] = Future()

    async def main() -> None:
        task = asyncio.ensure_future(awaited(future))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(main())
    future.set_result(1)
    assert future.wait() == 1
    assert capfd.readouterr().err == ""


# --- Waiting


def test_the_waiter_waits():
    calls: list[bool] = []
    future: Future[int] = Future(waiter=lambda done, block: wait(done, block))

    def wait(done: Callable[[], object], block: Callable[[], None]) -> None:
        calls.append(done())
        future.set_result(1)
        calls.append(done())

    assert future.wait() == 1
    assert calls == [False, True]
    assert future.wait() == 1  # at once


def test_a_waiter_may_sleep_until_the_future_is_done_even_if_it_fails():
    future: Future[int] = Future(waiter=lambda done, block: block())
    setter = threading.Thread(target=future.set_exception, args=(ValueError("no"),))
    setter.start()
    with pytest.raises(ValueError, match="no"):
        future.wait()
    setter.join()


def test_chained_futures_wait_the_same_way():
    waited: list[Callable[[], bool]] = []
    future: Future[int] = Future(
        waiter=lambda done, block: (waited.append(done), future.set_result(1))[0]
    )
    assert future.then(lambda f: f.wait()).wait() == 1
    assert len(waited) == 1


def test_a_handler_that_waits_is_replaced():
    # Nothing but the wait helps.
    pool = Executor("test", 1, contextvars.Context(), stall_seconds=3600.0)
    future: Future[int] = Future()
    results: list[int] = []
    finished = threading.Event()
    pool.submit(lambda: (results.append(future.wait()), finished.set()))
    pool.submit(lambda: future.set_result(1))
    assert finished.wait(SECONDS)
    pool.close()
    assert results == [1]


@pytest.mark.parametrize("has_grad", [True, False])
def test_a_callback_runs_in_the_grad_mode_in_which_it_was_given(has_grad: bool) -> None:
    future: Future[int] = Future()
    with torch.set_grad_enabled(has_grad):
        modes = [future.then(lambda _: torch.is_grad_enabled()) for _ in range(2)]
    with torch.set_grad_enabled(not has_grad):
        future.set_result(1)
        modes.append(future.then(lambda _: torch.is_grad_enabled()))
        assert torch.is_grad_enabled() is not has_grad
    assert [mode.wait() for mode in modes] == [has_grad, has_grad, not has_grad]
