"""Calls between agents: what goes in, what comes out, what fails and where."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import operator
import re
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rpc
from rpc.agent import Agent
from rpc.errors import (
    AgentClosedError,
    DecodeError,
    EncodeError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.outcomes.sinks import FutureSink
from rpc.testing import VirtualClock, as_worker, connect, local_group
from rpc.transports.base import Transport
from rpc.wire.messages import Operation
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")


def identity(value: Any) -> Any:
    return value


def whoami() -> str:
    return rpc.get_worker_info().name


def bounce(names: list[str]) -> list[str]:
    """Visits the workers in turn, each call nested in the one before."""
    if not names:
        return []
    return [names[0], *rpc.rpc_sync(names[0], bounce, (names[1:],))]


def fail_with(error: BaseException) -> None:
    raise error


class AwkwardError(Exception):
    """Its constructor does not take what ``args`` holds."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


def fail_awkwardly() -> None:
    raise AwkwardError(7, hint="übel \\ schlecht\nzweite Zeile")


@rpc.functions.async_execution
def add_on(to: str, x: int, y: int, z: int) -> torch.futures.Future[int]:
    return rpc.rpc_async(to, operator.add, (x, y)).then(lambda f: f.wait() + z)


@rpc.functions.async_execution
def no_future() -> int:  # type: ignore[misc]
    return 1


async def slow_square(x: int) -> int:
    await asyncio.sleep(0)
    return x * x


async def bounce_blocking(names: tuple[str, ...]) -> list[str]:
    """Does as ``bounce``, and holds its loop while it waits."""
    await asyncio.sleep(0)
    here = whoami()
    return [here, *rpc.rpc_sync(names[0], bounce_blocking, (names[1:],))] if names else [here]


async def wait_for_a_coroutine_here() -> int:
    return rpc.rpc_async(whoami(), slow_square, (3,)).wait()


async def wait_for_a_value_from_here() -> int:
    return rpc.rpc_sync("bob", fetch_from, (whoami(),))


def fetch_from(name: str) -> int:
    return rpc.remote(name, slow_square, (3,)).to_here()


class Steps:
    @staticmethod
    @rpc.functions.async_execution
    def static(to: str, x: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, operator.neg, (x,))

    @classmethod
    @rpc.functions.async_execution
    def klass(cls, to: str, x: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, operator.neg, (x,))


# --- What goes and comes back


def test_a_call_runs_on_the_other_worker(pair: list[Agent]) -> None:
    assert pair[0].rpc_sync("bob", whoami) == "bob"


def test_a_destination_may_be_name_id_or_worker_info(pair: list[Agent]) -> None:
    alice, bob = pair
    assert [alice.rpc_sync(to, whoami) for to in ("bob", 1, bob.info)] == ["bob"] * 3


def test_a_call_to_oneself_copies_its_arguments(pair: list[Agent]) -> None:
    value = [torch.ones(2)]
    answer = pair[0].rpc_sync("alice", identity, (value,))
    assert torch.equal(answer[0], value[0])
    assert answer[0].data_ptr() != value[0].data_ptr()


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, (2.5, "é\\n")], b"k": {3}},
        np.arange(6).reshape(2, 3),
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(2000, 3),
        torch.tensor(3.5, dtype=torch.bfloat16),
        torch.empty(0, 4),
        [torch.ones(2, dtype=torch.complex64), torch.tensor([True, False])],
        torch.randn(10, 10)[2:7, ::2],
        torch.eye(3).to_sparse(),
    ],
    ids=[
        "none",
        "containers",
        "numpy",
        "transposed",
        "large",
        "bfloat16",
        "empty",
        "kinds",
        "window",
        "sparse",
    ],
)
def test_a_value_arrives_as_it_was(pair: list[Agent], value: Any) -> None:
    answer = pair[0].rpc_sync("bob", identity, (value,))
    torch.testing.assert_close(answer, value) if isinstance(value, torch.Tensor) else None
    assert str(answer) == str(value)
    assert type(answer) is type(value)


def test_lambdas_closures_partials_and_bound_methods_travel(pair: list[Agent]) -> None:
    offset = 10
    alice = pair[0]
    assert alice.rpc_sync("bob", lambda x: x + offset, (1,)) == 11
    assert alice.rpc_sync("bob", functools.partial(operator.mul, 3), (4,)) == 12
    assert alice.rpc_sync("bob", "abc".upper) == "ABC"


def test_torch_operators_and_modules_travel(pair: list[Agent]) -> None:
    layer = nn.Linear(3, 2)
    x = torch.randn(4, 3)
    torch.testing.assert_close(pair[0].rpc_sync("bob", layer, (x,)), layer(x))
    assert torch.equal(pair[0].rpc_sync("bob", torch.add, (x,), {"other": 1}), x + 1)


def test_a_sent_view_does_not_drag_its_storage(pair: list[Agent]) -> None:
    wide = torch.zeros(1000, 1000)
    answer = pair[0].rpc_sync("bob", lambda t: t.untyped_storage().nbytes(), (wide[:, 0],))
    assert answer == 1000 * 4


def test_calls_nest_far_deeper_than_there_are_threads(make_group: Any) -> None:
    alice, _ = make_group("alice", "bob", num_worker_threads=1)
    path = ["bob", "alice"] * 20
    assert alice.rpc_sync("alice", bounce, (path,)) == path


def test_async_execution_replies_with_the_value_of_the_future(make_group: Any) -> None:
    alice, _ = make_group("alice", "bob", num_worker_threads=1)
    assert alice.rpc_sync("bob", add_on, ("alice", 1, 2, 3)) == 6
    assert alice.rpc_sync("bob", Steps.static, ("alice", 5)) == -5
    assert alice.rpc_sync("bob", Steps.klass, ("alice", 5)) == -5


def test_async_execution_requires_a_future(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future object"):
        pair[0].rpc_sync("bob", no_future)


def test_async_def_handlers_run_and_futures_can_be_awaited(pair: list[Agent]) -> None:
    alice = pair[0]

    async def several() -> list[int]:
        return await asyncio.gather(*(alice.rpc_async("bob", slow_square, (i,)) for i in range(5)))

    assert asyncio.run(several()) == [0, 1, 4, 9, 16]


def test_many_calls_in_flight_all_come_back(pair: list[Agent]) -> None:
    futures = [pair[0].rpc_async("bob", operator.add, (i, 1)) for i in range(2000)]
    assert torch.futures.wait_all(futures) == list(range(1, 2001))


def test_then_sees_the_agent_of_whoever_called_it(pair: list[Agent]) -> None:
    with as_worker(pair[0]):
        future = rpc.rpc_async("bob", whoami).then(lambda f: (f.wait(), whoami()))
    assert future.wait() == ("bob", "alice")


def test_a_callback_may_block_on_another_call(make_group: Any) -> None:
    alice, _ = make_group("alice", "bob", num_worker_threads=1)
    with as_worker(alice):
        chained = rpc.rpc_async("bob", identity, (1,)).then(
            lambda f: rpc.rpc_sync("bob", operator.add, (f.wait(), 1))
        )
    assert chained.wait() == 2


def test_a_callback_that_torch_hides_may_block_on_another_call(pair: list[Agent]) -> None:
    alice = pair[0]
    both = torch.futures.collect_all([alice.rpc_async("bob", identity, (i,)) for i in range(2)])
    chained = both.then(lambda _: alice.rpc_sync("bob", operator.add, (1, 2)))
    assert chained.wait() == 3


# --- Errors


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        KeyError("key"),
        ZeroDivisionError(),
        RuntimeError('näh \\ "quote" \n line'),
        FileNotFoundError(2, "No such file", "x.txt"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        StopIteration(3),
    ],
    ids=repr,
)
def test_an_exception_comes_back_as_its_own_type_and_runtime_error(
    pair: list[Agent], error: Exception
) -> None:
    with pytest.raises(type(error)) as caught:
        pair[0].rpc_sync("bob", fail_with, (error,))
    assert isinstance(caught.value, RuntimeError)
    assert caught.value.args == error.args
    assert str(error) in str(caught.value)
    assert "WorkerInfo(id=1, name=bob)" in str(caught.value)
    assert pair[0].rpc_sync("bob", whoami) == "bob"


def test_an_exception_with_an_unusual_constructor_keeps_its_attributes(pair: list[Agent]) -> None:
    with pytest.raises(AwkwardError) as caught:
        pair[0].rpc_sync("bob", fail_awkwardly)
    assert (caught.value.code, caught.value.hint) == (7, "übel \\ schlecht\nzweite Zeile")


def test_the_text_of_an_error_begins_with_what_it_says_itself(pair: list[Agent]) -> None:
    with pytest.raises(KeyError) as caught:
        pair[0].rpc_sync("bob", fail_with, (KeyError("key"),))
    beginning = "'key'\n\nOn WorkerInfo(id=1, name=bob):\nKeyError('key')\n"
    assert str(caught.value).startswith(beginning)


def test_the_remote_traceback_is_the_cause(pair: list[Agent]) -> None:
    with pytest.raises(AwkwardError) as caught:
        pair[0].rpc_sync("bob", fail_awkwardly)
    assert "in fail_awkwardly" in str(caught.value.__cause__)


def test_exits_in_a_handler_do_not_end_the_caller(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="SystemExit"):
        pair[0].rpc_sync("bob", fail_with, (SystemExit(3),))


def test_the_callee_prints_the_traceback_of_an_object_that_could_not_be_made(
    pair: list[Agent], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="boom"):
        pair[0].remote("bob", fail_with, (ValueError("boom"),)).to_here()
    assert "ValueError: boom" in capsys.readouterr().err


def test_a_future_raises_the_error_every_time_it_is_waited_for(pair: list[Agent]) -> None:
    future = pair[0].rpc_async("bob", fail_with, (ValueError("boom"),))
    for _ in range(2):
        with pytest.raises(ValueError, match="boom"):
            future.wait()


@pytest.mark.parametrize("to", ["carol", 5, -1])
def test_an_unknown_worker_is_named(pair: list[Agent], to: str | int) -> None:
    with pytest.raises(UnknownWorkerError, match=rf"could not find destination (name|id) {to}"):
        pair[0].rpc_sync(to, whoami)


@pytest.mark.parametrize("to", [1.5, None, True])
def test_a_destination_of_the_wrong_type_is_a_value_error(pair: list[Agent], to: Any) -> None:
    with pytest.raises(ValueError, match="Cannot get WorkerInfo"):
        pair[0].rpc_sync(to, whoami)


@pytest.mark.parametrize("start", ["rpc_sync", "rpc_async", "remote"])
def test_what_cannot_be_called_is_refused_at_once(pair: list[Agent], start: str) -> None:
    with pytest.raises(TypeError, match="func=3 cannot be called"):
        getattr(pair[0], start)("bob", 3)


@pytest.mark.parametrize("start", ["rpc_sync", "rpc_async", "remote"])
def test_what_cannot_be_arguments_is_refused_before_anything_is_sent(
    pair: list[Agent], start: str
) -> None:
    call = getattr(pair[0], start)
    with pytest.raises(TypeError, match=r"args=tensor.* is a Tensor, not a tuple"):
        call("bob", identity, torch.zeros(1))
    with pytest.raises(TypeError, match=r"kwargs=\('value', 1\) is a tuple, not a dict"):
        call("bob", identity, None, ("value", 1))
    with pytest.raises(TypeError, match="has the key 1"):
        call("bob", identity, (), {1: 2})
    assert not pair[0].metrics().made
    assert pair[0].rpc_sync("bob", identity, None, {"value": 4}) == 4


def test_an_argument_that_cannot_be_sent_is_named(pair: list[Agent]) -> None:
    with pytest.raises(EncodeError, match=r"argument 1.*lock"):
        pair[0].rpc_sync("bob", identity, (1, threading.Lock()))
    assert pair[0].rpc_sync("bob", whoami) == "bob"


def test_a_result_that_cannot_be_sent_fails_the_call(pair: list[Agent]) -> None:
    with pytest.raises(EncodeError, match="lock"):
        pair[0].rpc_sync("bob", threading.Lock)
    assert pair[0].rpc_sync("bob", whoami) == "bob"


def count_up() -> Iterator[int]:
    yield 1


def test_a_generator_cannot_be_sent_either_way(pair: list[Agent]) -> None:
    with pytest.raises(EncodeError, match=r"argument 0 \(generator\) of identity cannot be sent"):
        pair[0].rpc_sync("bob", identity, (count_up(),))
    with pytest.raises(EncodeError, match="a value of type generator cannot be sent"):
        pair[0].rpc_sync("bob", count_up)


def test_a_future_cannot_be_sent(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        pair[0].rpc_sync("bob", identity, (torch.futures.Future(),))
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        pair[0].rpc_sync("bob", torch.futures.Future)


def test_a_function_missing_at_the_callee_is_named(pair: list[Agent]) -> None:
    alice, bob = pair
    future = alice.caller.future("a call")
    sink = FutureSink(future, alice.completions)
    name = b"only_at_the_caller\0helper"
    alice.caller.request(Operation.CALL, bob.info, (), -1, sink, b"", "helper", name)
    with pytest.raises(DecodeError, match=r"RPC pickler does not serialize.*'helper'.*only_at"):
        future.wait()
    assert alice.rpc_sync("bob", whoami) == "bob"


# --- Time and loss


def test_a_call_times_out_and_the_group_goes_on() -> None:
    clock = VirtualClock()
    release = threading.Event()
    with local_group("alice", "bob", clock=clock) as (alice, _):
        future = alice.rpc_async("bob", _wait_for, (id(_keep(release)),), timeout=0.1)
        clock.advance(0.2)
        with pytest.raises(RpcTimeoutError, match=r"RPC ran for more than set timeout \(100 ms\)"):
            future.wait()
        release.set()
        assert alice.rpc_sync("bob", operator.add, (1, 2)) == 3


_kept: dict[int, threading.Event] = {}


def _keep(event: threading.Event) -> threading.Event:
    _kept[id(event)] = event
    return event


def _wait_for(key: int) -> bool:
    return _kept[key].wait(20)


def test_nested_calls_inherit_what_is_left_of_the_deadline() -> None:
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _):
        left = alice.rpc_sync("bob", _time_left, timeout=5)
        assert left == pytest.approx(5)
        assert alice.rpc_sync("bob", _time_left, timeout=0) == 60


def _time_left() -> float:
    return rpc.api.current_agent().timeouts.of(-1)


def test_a_negative_timeout_other_than_minus_one_fails_at_once(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="timeout must be >= 0"):
        pair[0].rpc_sync("bob", whoami, timeout=-2)


def test_a_lost_worker_fails_its_calls_at_once_and_no_others() -> None:
    release = threading.Event()
    hub = rpc.testing.MemoryHub()
    with local_group("alice", "bob", "carol", hub=hub) as (alice, _, _):
        doomed = alice.rpc_async("bob", _wait_for, (id(_keep(release)),))
        also_doomed = alice.rpc_async("bob", _wait_for, (id(release),))
        spared = alice.rpc_async("carol", _wait_for, (id(release),))
        hub.cut(1, "its machine burned down")
        with pytest.raises(WorkerLostError, match=r"'bob'.*its machine burned down") as one:
            doomed.wait()
        with pytest.raises(WorkerLostError, match=r"'bob'.*its machine burned down") as other:
            also_doomed.wait()
        assert one.value is not other.value  # each knows the frames of its own call only
        with pytest.raises(WorkerLostError, match="'bob'"):
            alice.rpc_sync("bob", whoami)
        with pytest.raises(WorkerLostError, match="'bob'"):
            alice.rpc_async("bob", whoami).wait()
        release.set()
        assert spared.wait() is True
        assert alice.rpc_sync("carol", whoami) == "carol"


# --- Leaving


def _shut_down_together(agents: list[Agent]) -> None:
    threads = [threading.Thread(target=agent.shutdown) for agent in agents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_shutdown_waits_for_calls_nobody_awaited() -> None:
    agents = connect("alice", "bob")
    done: list[int] = []
    futures = [agents[0].rpc_async("bob", operator.add, (i, 0)) for i in range(3000)]
    for future in futures:
        future.add_done_callback(lambda f: done.append(f.value()))
    _shut_down_together(agents)
    assert sorted(done) == list(range(3000))


def _spread(hops: int) -> None:
    """Starts two calls for each hop left, and awaits neither."""
    _spread_count.append(hops)
    if hops:
        others = [n for n in ("alice", "bob", "carol") if n != rpc.get_worker_info().name]
        for other in others:
            rpc.rpc_async(other, _spread, (hops - 1,))


_spread_count: list[int] = []


def test_shutdown_waits_for_calls_spawned_by_calls() -> None:
    _spread_count.clear()
    agents = connect("alice", "bob", "carol")
    agents[0].rpc_async("bob", _spread, (6,))
    _shut_down_together(agents)
    assert len(_spread_count) == 2**7 - 1


def test_after_shutdown_calls_are_refused() -> None:
    agents = connect("alice", "bob")
    _shut_down_together(agents)
    with pytest.raises((AgentClosedError, WorkerLostError)):
        agents[0].rpc_sync("bob", whoami)


def test_shutdown_gives_up_at_its_deadline_and_names_who_was_missing() -> None:
    alice, bob = connect("alice", "bob")
    with pytest.raises(RpcTimeoutError, match=r"Followers \['bob'\] timed out in _all_gather"):
        alice.shutdown(timeout=0.05)
    bob.shutdown(graceful=False)


def test_an_ungraceful_shutdown_fails_the_peers_calls() -> None:
    release = threading.Event()
    alice, bob = connect("alice", "bob")
    future = alice.rpc_async("bob", _wait_for, (id(_keep(release)),))
    release.set()
    bob.shutdown(graceful=False)
    with contextlib.suppress(WorkerLostError):
        future.wait()
    with pytest.raises(WorkerLostError, match="bob"):
        alice.rpc_sync("bob", whoami)
    alice.shutdown()


_busy, _free = threading.Event(), threading.Event()


def _hold() -> None:
    _busy.set()
    assert _free.wait(20)


@pytest.mark.parametrize(
    "handler", [wait_for_a_coroutine_here, wait_for_a_value_from_here], ids=["self", "other"]
)
def test_a_coroutine_may_wait_for_one_of_its_own_worker(
    pair: list[Agent], handler: Callable[[], Any]
) -> None:
    assert [pair[1].rpc_sync("alice", handler) for _ in range(3)] == [9, 9, 9]


def test_coroutines_that_wait_for_each_other_in_turn_come_back(pair: list[Agent]) -> None:
    names = ("bob", "alice") * 10
    assert pair[0].rpc_sync("alice", bounce_blocking, (names,)) == ["alice", *names]


async def _hold_the_loop() -> None:
    _hold()


@pytest.mark.parametrize("handler", [_hold, _hold_the_loop])
@pytest.mark.parametrize("graceful", [True, False])
def test_a_shutdown_that_must_end_does_not_wait_for_a_handler(
    make_transport: Callable[[], Transport] | None, handler: Callable[[], Any], graceful: bool
) -> None:
    _busy.clear()
    _free.clear()
    agents = connect("alice", "bob", transport=make_transport)
    future = agents[0].rpc_async("bob", handler)
    assert _busy.wait(20)
    began = time.monotonic()
    with pytest.raises(RpcTimeoutError) if graceful else contextlib.nullcontext():
        agents[1].shutdown(graceful, timeout=0.1)
    assert time.monotonic() - began < 3  # nothing of a handler's five seconds
    _free.set()  # and then the fixture sees that it ends, and leaves nothing
    with pytest.raises(WorkerLostError):
        future.wait()
    agents[0].shutdown(graceful=False)


class Unclosable:
    """An extension."""

    def __init__(self, word: str) -> None:
        self.name = word

    def close(self) -> None:
        raise ValueError(f"{self.name} cannot be closed")


def test_a_step_of_closing_that_fails_keeps_no_other_from_being_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = connect("alice", "bob")
    assert alice.rpc_sync("alice", whoami) == "alice"
    alice.extensions.loaded["first"] = Unclosable("first")  # type: ignore[assignment]
    stop = alice.pulse.stop

    def fail_after() -> None:
        stop()
        raise KeyError("second")

    monkeypatch.setattr(alice.pulse, "stop", fail_after)
    with pytest.raises(ValueError, match="first cannot be closed"):
        alice.shutdown(graceful=False)
    assert "a further step failed: 'second'" in caplog.text
    with pytest.raises(AgentClosedError):
        alice.rpc_sync("bob", whoami)
    bob.shutdown()  # and the fixture sees that no thread of alice is left


def test_shutdown_waits_only_for_the_living() -> None:
    hub = rpc.testing.MemoryHub()
    agents = connect("alice", "bob", "carol", hub=hub)
    hub.cut(0)
    _shut_down_together(agents[1:])
    agents[0].shutdown(graceful=False)


async def shut_down_in_a_coroutine() -> None:
    rpc.api.current_agent().shutdown(timeout=20)


def test_shutdown_in_a_handler_is_refused_and_changes_nothing(pair: list[Agent]) -> None:
    with pytest.raises(RuntimeError, match="called in a handler"):
        pair[0].rpc_sync("bob", rpc.shutdown, timeout=20)
    with pytest.raises(RuntimeError, match="called in a handler"):
        pair[0].rpc_sync("bob", lambda: rpc.api.current_agent().shutdown(), timeout=20)
    with pytest.raises(RuntimeError, match="called in a handler"):
        pair[0].rpc_sync("bob", shut_down_in_a_coroutine, timeout=20)
    assert pair[0].rpc_sync("bob", whoami, timeout=20) == "bob"


@pytest.mark.parametrize("seconds", [math.inf, 1e10])
def test_shutdown_may_wait_for_ever(seconds: float) -> None:
    alice, bob = connect("alice", "bob")
    waiting = threading.Thread(target=alice.shutdown, args=(True, seconds))
    waiting.start()
    bob.shutdown(timeout=20)
    waiting.join(20)
    assert not waiting.is_alive()


@pytest.mark.parametrize("seconds", [math.inf, 1e10])
def test_a_member_that_leaves_alone_may_wait_for_ever(pair: list[Agent], seconds: float) -> None:
    alice, _ = pair
    call = alice.rpc_async("bob", _wait_for, (id(_keep(release := threading.Event())),))
    leaving = threading.Thread(target=alice.group_shutdown.leave_alone, args=(seconds,))
    leaving.start()
    release.set()
    leaving.join(20)
    assert not leaving.is_alive()
    assert call.wait()


def test_a_call_is_served_though_a_thread_could_not_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    start, refused = threading.Thread.start, threading.Event()

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "rpc-there-handler" and not refused.is_set():
            refused.set()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    with local_group("here", "there") as (here, _):
        assert here.rpc_sync("there", abs, (-1,), timeout=20) == 1
    assert refused.is_set()


left_running: list[asyncio.Task[int]] = []


async def leave_running() -> None:
    async def call_later() -> int:
        while not time_is_over.is_set():
            await asyncio.sleep(0.001)
        return await rpc.rpc_async("here", abs, (-1,))

    left_running.append(asyncio.create_task(call_later()))


time_is_over = threading.Event()


async def join_what_was_left() -> int:
    return await left_running.pop()


def test_what_a_handler_left_running_is_not_bound_by_the_time_of_its_call() -> None:
    clock = VirtualClock()
    with local_group("here", "there", clock=clock) as (here, there):
        here.rpc_sync("there", leave_running, timeout=5)
        until(there.callee.quiet)
        clock.advance(10)
        time_is_over.set()
        assert here.rpc_sync("there", join_what_was_left) == 1


def test_programs_of_the_original_ask_the_agent_for_its_map_of_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = {torch.device("cuda", 0): torch.device("cuda", 1)}
    with local_group("here", "there") as (here, _):
        assert here._get_device_map(here.get_worker_info("there")) == {}
        maps = SimpleNamespace(device_map=lambda to: known if to == 1 else {}, host_moves=set())
        with monkeypatch.context() as patched:
            patched.setattr(here, "transport", maps)
            assert here._get_device_map("there") == known
            assert here._get_device_map("here") == {}


def test_a_method_that_failed_and_nobody_looked_at_is_logged_by_its_name(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        rref = alice.remote("bob", list, ([1],))
        future = rref.rpc_async().index(2)
        until(future.done)
        del future, rref
        until(lambda: gc.collect() >= 0 and bool(caplog.records))
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert told == ["the call of RRef.index on bob failed and nobody looked"]


def test_a_call_has_one_name_in_the_log_and_in_dumps(
    pair: list[Agent], caplog: pytest.LogCaptureFixture
) -> None:
    nameless = functools.partial(fail_with, KeyError("x"))
    pair[0].rpc_async(pair[1].info, nameless)
    until(lambda: gc.collect() >= 0 and "nobody looked" in caplog.text)
    assert "the call of partial on bob failed and nobody looked" in caplog.text
    assert [row.method for row in pair[0].metrics().made] == ["partial"]


def test_one_that_leaves_in_haste_names_the_calls_that_it_leaves_running(
    caplog: pytest.LogCaptureFixture,
) -> None:
    release = threading.Event()
    alice, bob = connect("alice", "bob")
    alice.rpc_async("bob", _wait_for, (id(_keep(release)),))
    until(lambda: bool(bob.callee.serving()))
    bob.shutdown(graceful=False)
    release.set()
    assert re.search(r"'bob' left while .*_wait_for, called by 'alice', was still", caplog.text)
    alice.shutdown()
