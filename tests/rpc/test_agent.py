"""Calls between agents: what goes in, what comes out, what fails and where."""

from __future__ import annotations

import asyncio
import functools
import gc
import operator
import threading
from collections import ChainMap, UserDict
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import rpc
from rpc.agent import Agent
from rpc.errors import (
    DecodeError,
    EncodeError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.outcomes.sinks import FutureSink
from rpc.rrefs.rref import call_method
from rpc.testing import VirtualClock, as_worker, local_group
from rpc.wire.messages import Operation
from rpc.worker_info import WorkerInfo
from tests.rpc.handlers import (
    keep_event,
    slow_square,
    wait_for_event,
    whoami,
)
from tests.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore:.*sparse.*:UserWarning")


def identity(value: Any) -> Any:
    return value


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


@pytest.mark.parametrize("id_of", [np.int64, torch.tensor])
def test_a_worker_info_may_have_an_id_of_any_whole_number(
    pair: list[Agent], id_of: Callable[[int], Any]
) -> None:
    info = WorkerInfo("bob", id_of(1))
    assert type(info.id) is int
    assert pair[0].rpc_sync(info, whoami) == "bob"
    assert pair[0].rpc_async(info, whoami).wait() == "bob"
    assert pair[0].remote(info, whoami).to_here() == "bob"


@pytest.mark.parametrize("mapping", [MappingProxyType, UserDict, ChainMap])
def test_arguments_by_name_may_be_any_mapping(
    pair: list[Agent], mapping: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> None:
    alice = pair[0]
    assert alice.rpc_sync("bob", identity, None, mapping({"value": 3})) == 3
    number = alice.remote("bob", int, (5,))
    how = mapping({"length": 2, "byteorder": "big"})
    assert alice.rpc_sync("bob", call_method, (number, "to_bytes"), how) == b"\0\5"


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
    told = str(caught.value.__cause__)
    assert "in fail_awkwardly" in told
    assert "raise AwkwardError(7, hint=" in told  # the line itself


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
    with pytest.raises(EncodeError, match=r"argument 1.*lock") as refused:
        pair[0].rpc_sync("bob", identity, (1, threading.Lock()))
    assert isinstance(refused.value.__cause__, EncodeError)
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
        future = alice.rpc_async("bob", wait_for_event, (id(keep_event(release)),), timeout=0.1)
        clock.advance(0.2)
        with pytest.raises(RpcTimeoutError, match=r"RPC ran for more than set timeout \(100 ms\)"):
            future.wait()
        release.set()
        assert alice.rpc_sync("bob", operator.add, (1, 2)) == 3


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
        doomed = alice.rpc_async("bob", wait_for_event, (id(keep_event(release)),))
        also_doomed = alice.rpc_async("bob", wait_for_event, (id(release),))
        spared = alice.rpc_async("carol", wait_for_event, (id(release),))
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
