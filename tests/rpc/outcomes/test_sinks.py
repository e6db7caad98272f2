"""The outcome of a request reaches its sink; user code runs on the threads that it may block."""

from __future__ import annotations

import asyncio
import contextvars
import operator
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpc.errors import DecodeError
from rpc.outcomes import collecting
from rpc.outcomes.completions import Completions as RealCompletions
from rpc.outcomes.futures import Future
from rpc.outcomes.sinks import AnswerSink, Decode, FutureSink, WaitingCaller
from rpc.runtime.executor import Executor
from rpc.testing import local_group
from rpc.testing.memory import MemoryHub, MemoryTransport
from rpc.transports.base import Frame, FrameKind
from rpc.wire.codec import ImportNeeded, decode, decode_loaded
from rpc.wire.messages import Reply, Status

SECONDS = 10.0
FRAME = Frame(FrameKind.REPLY, 1, b"")
PLAIN = Reply(Status.OK)


class Completions:
    """Keeps what it is given until the test runs it, with what it was given as."""

    def __init__(self, lends_delivery: bool = True) -> None:
        self.lends_delivery = lends_delivery
        self.tasks: deque[tuple[str, Callable[[], None]]] = deque()

    def submit(self, task: Callable[[], None]) -> None:
        self.tasks.append(("submit", task))

    def run_on_delivery(self, task: Callable[[], None]) -> None:
        self.tasks.append(("run on delivery", task))

    def run(self) -> str:
        kind, task = self.tasks.popleft()
        task()
        return kind


class Unpack:
    """Returns a value or raises an error, and remembers how it was asked."""

    def __init__(self, outcome: object, needs_import: bool = False) -> None:
        self.outcome = outcome
        self.needs_import = needs_import
        self.decoders: list[Decode] = []

    def __call__(self, reply: Reply, frame: Frame, decoder: Decode) -> Any:
        self.decoders.append(decoder)
        if self.needs_import and decoder is decode_loaded:
            raise ImportNeeded
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


def sleep(done: Callable[[], object], block: Callable[[], None]) -> None:
    block()


# --- A waiting caller


def test_a_waiting_caller_unpacks_the_reply_itself():
    caller, unpack = WaitingCaller(), Unpack(7)
    threads: list[threading.Thread] = []

    def unpack_here(reply: Reply, frame: Frame, decoder: Decode) -> Any:
        threads.append(threading.current_thread())
        return unpack(reply, frame, decoder)

    deliverer = threading.Thread(target=caller.replied, args=(PLAIN, FRAME, unpack_here))
    deliverer.start()
    assert caller.result(sleep) == 7
    deliverer.join()
    assert threads == [threading.current_thread()]
    assert unpack.decoders == [decode]


def test_a_waiting_caller_gets_the_error_of_the_reply():
    caller, error = WaitingCaller(), ValueError("remote")
    caller.replied(PLAIN, FRAME, Unpack(error))
    with pytest.raises(ValueError, match="remote") as raised:
        caller.result(sleep)
    assert raised.value is error


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_would_end_a_thread_as_a_reply_is_unpacked_does_not_end_the_waiting_caller(
    kind: type[BaseException],
):
    caller, error = WaitingCaller(), kind("stop")
    caller.replied(PLAIN, FRAME, Unpack(error))
    with pytest.raises(
        DecodeError, match=f"unpacking what arrived raised {kind.__name__}"
    ) as raised:
        caller.result(sleep)
    assert raised.value.__cause__ is error


def test_a_waiting_caller_gets_the_error_of_a_call_without_reply():
    caller, error = WaitingCaller(), ValueError("lost")
    deliverer = threading.Thread(target=caller.failed, args=(error,))
    deliverer.start()
    with pytest.raises(ValueError, match="lost") as raised:
        caller.result(sleep)
    deliverer.join()
    assert raised.value is error


@pytest.mark.parametrize("comes_first", [True, False])
def test_a_reply_that_nobody_waits_for_has_its_references_taken_once(comes_first: bool):
    caller, taken = WaitingCaller(), list[bytes]()
    reply, unpack = Reply(Status.OK, references=b"table"), Unpack(7)
    acts = [lambda: caller.replied(reply, FRAME, unpack), lambda: caller.abandon(taken.append)]
    for act in acts if comes_first else reversed(acts):
        assert taken == []
        act()
    assert taken == [b"table"]
    assert unpack.decoders == []


@pytest.mark.parametrize("value", [None, 0, ""])
def test_a_false_value_is_a_value(value: object):
    caller = WaitingCaller()
    caller.replied(PLAIN, FRAME, Unpack(value))
    assert caller.result(sleep) == value


def test_a_transport_that_reads_for_the_caller_need_not_block():
    caller = WaitingCaller()
    seen: list[bool] = []

    def read(done: Callable[[], object], block: Callable[[], None]) -> None:
        seen.append(done())
        caller.replied(PLAIN, FRAME, Unpack(3))
        seen.append(done())

    assert caller.result(read) == 3
    assert seen == [False, True]


def test_a_handler_that_calls_is_replaced_while_it_waits():
    # Nothing but the wait helps.
    pool = Executor("test", 1, contextvars.Context(), stall_seconds=3600.0)
    caller, results, done = WaitingCaller(), [], threading.Event()
    pool.submit(lambda: (results.append(caller.result(sleep)), done.set()))
    pool.submit(lambda: caller.replied(PLAIN, FRAME, Unpack(5)))
    assert done.wait(SECONDS)
    pool.close()
    assert results == [5]


# --- A future


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_what_would_end_a_thread_as_a_reply_is_unpacked_fails_the_future(
    kind: type[BaseException],
):
    future, completions, error = Future(), Completions(), kind("stop")
    answers: list[Any] = []
    reply = Reply(Status.OK, plain=False)
    FutureSink(future, completions).replied(reply, FRAME, Unpack(error))
    AnswerSink(lambda *answer: answers.append(answer), completions).replied(
        reply, FRAME, Unpack(error)
    )
    completions.run(), completions.run()
    with pytest.raises(DecodeError, match=f"unpacking what arrived raised {kind.__name__}") as told:
        future.value()
    assert told.value.__cause__ is error
    assert isinstance(answers[0][1], DecodeError)


@pytest.mark.parametrize("outcome", [7, None, ValueError("remote")])
def test_a_plain_outcome_completes_a_future_at_once(outcome: object):
    future, completions, unpack = Future(), Completions(), Unpack(outcome)
    FutureSink(future, completions).replied(PLAIN, FRAME, unpack)
    assert not completions.tasks
    assert unpack.decoders == [decode_loaded]
    expect(future, outcome)


@pytest.mark.parametrize(
    "reply",
    [
        Reply(Status.OK, plain=False),
        Reply(Status.OK, references=b"r"),
        Reply(Status.OK, extensions=(("e", b""),)),
    ],
    ids=["not plain", "with references", "with extensions"],
)
@pytest.mark.parametrize("outcome", [7, ValueError("remote")])
def test_what_may_run_user_code_is_unpacked_where_that_may_run(reply: Reply, outcome: object):
    future, completions, unpack = Future(), Completions(), Unpack(outcome)
    FutureSink(future, completions).replied(reply, FRAME, unpack)
    assert not future.done()
    assert unpack.decoders == []
    assert completions.run() == "run on delivery"
    assert unpack.decoders == [decode]
    expect(future, outcome)


def test_a_value_that_needs_an_import_is_unpacked_where_that_may_run():
    future, completions, unpack = Future(), Completions(), Unpack(7, needs_import=True)
    FutureSink(future, completions).replied(PLAIN, FRAME, unpack)
    assert not future.done()
    completions.run()
    assert unpack.decoders == [decode_loaded, decode]
    assert future.wait() == 7


@pytest.mark.parametrize("outcome", [7, ValueError("remote")])
def test_callbacks_run_where_user_code_may_run(outcome: object):
    future, completions, unpack = Future(), Completions(), Unpack(outcome)
    called: list[object] = []
    future.add_done_callback(called.append)
    FutureSink(future, completions).replied(PLAIN, FRAME, unpack)
    assert called == []
    assert completions.run() == "run on delivery"
    assert called == [future]
    assert len(unpack.decoders) == 1
    expect(future, outcome)


def test_callbacks_on_several_calls_run_where_user_code_may_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._C, "_collect_all", collecting.collect_all)
    future, completions = Future(), Completions()
    called: list[object] = []
    together = torch.futures.collect_all([future])
    together.add_done_callback(called.append)
    FutureSink(future, completions).replied(PLAIN, FRAME, Unpack(7))
    assert future.done()
    assert called == []
    assert completions.run() == "submit"
    assert called == [together]


def test_nothing_is_completed_on_threads_that_the_transport_cannot_spare():
    """Torch's ``collect_all`` adds callbacks that nobody can see, and they may block."""
    future, completions = Future(), Completions(lends_delivery=False)
    called: list[object] = []
    torch.futures.collect_all([future]).add_done_callback(called.append)
    FutureSink(future, completions).replied(PLAIN, FRAME, Unpack(7))
    assert called == []
    assert completions.run() == "run on delivery"
    assert len(called) == 1
    assert future.wait() == 7


@pytest.mark.parametrize("watched", [True, False])
def test_a_failure_waits_for_a_thread_that_may_run_callbacks(watched: bool):
    future, completions, error = Future(), Completions(), ValueError("lost")
    called: list[object] = []
    if watched:
        future.add_done_callback(called.append)
    FutureSink(future, completions).failed(error)
    assert not future.done()
    assert completions.run() == "submit"
    assert called == [future] * watched
    expect(future, error)


def expect(future: Future[Any], outcome: object) -> None:
    if isinstance(outcome, Exception):
        with pytest.raises(type(outcome)) as raised:
            future.wait()
        assert raised.value is outcome
    else:
        assert future.wait() == outcome


# --- At the end


# --- A function of the framework's own


@pytest.mark.parametrize("outcome", [7, ValueError("remote")])
def test_a_plain_answer_is_taken_where_it_is_delivered(outcome: object):
    answers: list[object] = []
    completions = Completions()
    AnswerSink(lambda *answer: answers.append(answer), completions).replied(
        PLAIN, FRAME, Unpack(outcome)
    )
    assert answers == [(7, None) if outcome == 7 else (None, outcome)]
    assert not completions.tasks


@pytest.mark.parametrize(
    ("reply", "needs_import"), [(Reply(Status.ERROR, plain=False), False), (PLAIN, True)]
)
def test_an_answer_that_may_run_code_of_others_is_unpacked_elsewhere(
    reply: Reply, needs_import: bool
):
    answers: list[object] = []
    completions = Completions()
    sink = AnswerSink(lambda *answer: answers.append(answer), completions)
    sink.replied(reply, FRAME, Unpack(7, needs_import=needs_import))
    assert answers == []
    assert completions.run() == "submit"
    assert answers == [(7, None)]


def test_the_failure_of_a_question_is_told_elsewhere():
    answers: list[object] = []
    completions, error = Completions(), ValueError("lost")
    AnswerSink(lambda *answer: answers.append(answer), completions).failed(error)
    assert answers == []
    assert completions.run() == "submit"
    assert answers == [(None, error)]


def test_no_completion_is_dropped_when_its_worker_closes():
    # There is no second thread.
    pool = Executor("test", 1, contextvars.Context(), stall_seconds=3600.0)
    changes: list[None] = []
    completions = RealCompletions(pool, MemoryTransport(MemoryHub()), lambda: changes.append(None))
    running, let_go = threading.Event(), threading.Event()
    ran: list[str] = []
    completions.submit(lambda: (running.set(), let_go.wait(SECONDS)))
    assert running.wait(SECONDS)
    completions.submit(lambda: ran.append("queued"))
    assert not completions.quiet()
    let_go_soon = threading.Timer(0.01, let_go.set)
    let_go_soon.start()
    completions.close()
    let_go_soon.join()
    completions.submit(lambda: ran.append("late"))
    completions.run_on_delivery(lambda: ran.append("delivered late"))
    assert ran == ["queued", "late", "delivered late"]
    assert completions.quiet()
    assert len(changes) == 4


def test_a_callback_on_collected_futures_may_call_although_one_thread_delivers():
    with local_group("alice", "bob") as (alice, _):
        calls = [alice.rpc_async("bob", operator.add, (1, number)) for number in range(2)]
        both = torch.futures.collect_all(calls)
        chained = both.then(lambda _: alice.rpc_sync("bob", operator.add, (2, 3)))
        assert chained.wait() == 5


class FreesIntoAnother:
    """Has another reply taken while what held it is freed, as a finalizer of a tensor may."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def __del__(self) -> None:
        self.then()


def test_a_reply_that_comes_while_another_is_freed_keeps_what_it_holds() -> None:
    completions, second = Completions(lends_delivery=False), Future[int]()
    more = Reply(Status.OK, plain=False)
    freed = FreesIntoAnother(
        lambda: FutureSink(second, completions).replied(more, FRAME, Unpack(2))
    )
    frame: Any = Frame(FrameKind.REPLY, 1, b"", b"", (freed,))  # type: ignore[arg-type]
    del freed
    first = Future[int]()
    FutureSink(first, completions).replied(more, frame, Unpack(1))
    del frame
    completions.run()
    assert first.wait() == 1
    completions.run()
    assert second.wait() == 2
