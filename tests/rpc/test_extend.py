"""The names that packages above ``rpc`` build on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

import rpc
from rpc import extend
from rpc.agent import Agent
from rpc.backend_registry import BackendType
from rpc.errors import (
    AgentClosedError,
    EncodeError,
    NotInitializedError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.extend import Life
from rpc.testing import as_worker, local_group
from rpc.transports.tensorwire import (
    TensorWireRpcBackendOptions,
    TensorWireTransport,
    requests,
)
from tests.free_ports import free_port
from tests.rpc.worker_processes import WorkerProcess, join, leave
from tests.waiting import until

LARGE = 1 << 16
"""Elements of a tensor that goes through shared memory, where there is some."""

Taken = list[tuple[Life, bytes, list[torch.Tensor]]]


def record(agent: Agent, channel: str = "test") -> Taken:
    taken: Taken = []
    agent.worker.subscribe(channel, lambda *message: taken.append(message))
    return taken


# --- State


class Counter:
    def __init__(self) -> None:
        self.count = 0
        self.closed = False


def count_up() -> int:
    counter = extend.worker_state(Counter, Counter)
    counter.count += 1
    return counter.count


def test_each_worker_of_a_process_keeps_its_own_state(pair: list[Agent]) -> None:
    alice, _ = pair
    assert [alice.rpc_sync("bob", count_up) for _ in range(3)] == [1, 2, 3]
    assert alice.rpc_sync("alice", count_up) == 1


def test_state_is_made_once_however_many_ask_for_it(pair: list[Agent]) -> None:
    made: list[object] = []
    going = threading.Event()

    def make() -> object:
        going.wait(10)
        made.append(object())
        return made[-1]

    found: list[object] = []
    threads = [
        threading.Thread(target=lambda: found.append(pair[0].worker.state("key", make)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    going.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    assert found == made * 4


def test_state_is_closed_with_its_worker_the_latest_first() -> None:
    closed: list[str] = []
    with local_group("alice") as (alice,):
        for name in ("first", "second"):
            alice.worker.state(name, lambda name=name: name, closed.append)
    assert closed == ["second", "first"]
    with pytest.raises(AgentClosedError, match="keeps nothing for 'third'"):
        alice.worker.state("third", Counter)


def test_without_a_worker_there_is_no_state() -> None:
    with pytest.raises(NotInitializedError):
        extend.worker_state("key", Counter)


# --- Channels


def test_a_posted_message_arrives_with_its_sender_and_tensors(pair: list[Agent]) -> None:
    alice, bob = pair
    taken = record(bob)
    sent = [torch.arange(3), torch.rand(2, LARGE), torch.rand(4, 3).t()]
    with as_worker(alice):
        extend.post("bob", "test", b"body", sent)
        extend.post(extend.life_of(1), "test")
    until(lambda: len(taken) == 2)
    full, empty = sorted(taken, key=lambda message: -len(message[1]))
    assert full[:2] == (Life(0, 0), b"body")
    assert all(torch.equal(*pair) for pair in zip(full[2], sent, strict=True))
    assert full[2][2].stride() == sent[2].stride()
    assert empty == (Life(0, 0), b"", [])


def test_a_handler_sees_its_own_worker_and_may_call_others(pair: list[Agent]) -> None:
    alice, bob = pair
    names: list[str] = []

    def ask(sender: Life, body: bytes, tensors: list[torch.Tensor]) -> None:
        names.append(rpc.rpc_sync(sender.worker, rpc.get_worker_info).name)
        names.append(extend.worker().info.name)

    bob.worker.subscribe("ask", ask)
    alice.worker.post("bob", "ask")
    until(lambda: len(names) == 2)
    assert names == ["alice", "bob"]


def test_what_a_handler_raises_is_logged_and_the_next_message_comes(
    pair: list[Agent], caplog: pytest.LogCaptureFixture
) -> None:
    alice, bob = pair
    taken: list[bytes] = []

    def fail(sender: Life, body: bytes, tensors: list[torch.Tensor]) -> None:
        taken.append(body)
        raise ValueError(body)

    bob.worker.subscribe("fails", fail)
    for body in (b"1", b"2"):
        alice.worker.post("bob", "fails", body)
    until(lambda: caplog.text.count("a handler of channel 'fails' failed") == 2)
    assert sorted(taken) == [b"1", b"2"]


def test_messages_that_nobody_takes_are_dropped_and_logged_once(
    pair: list[Agent], caplog: pytest.LogCaptureFixture
) -> None:
    alice, bob = pair
    end = bob.worker.subscribe("test", print)
    end()
    taken = record(bob, "other")
    for _ in range(3):
        alice.worker.post("bob", "test")
    until(lambda: "nobody subscribed" in caplog.text)
    alice.worker.post("bob", "other")
    until(lambda: bool(taken))
    assert caplog.text.count("nobody subscribed") == 1


def test_a_graceful_shutdown_waits_until_posted_messages_were_handled(
    make_group: Callable[..., list[Agent]],
) -> None:
    agents = alice, bob = make_group("alice", "bob")
    going, answered = threading.Event(), record(alice, "answers")

    def handle(sender: Life, body: bytes, tensors: list[torch.Tensor]) -> None:
        assert going.wait(20)
        extend.post(sender, "answers", body)

    bob.worker.subscribe("slow", handle)
    for _ in range(5):
        alice.worker.post("bob", "slow", b"x", [torch.ones(2)])
    leaving = [threading.Thread(target=agent.shutdown) for agent in agents]
    for thread in leaving:
        thread.start()
    leaving[0].join(0.3)
    assert leaving[0].is_alive()
    going.set()
    for thread in leaving:
        thread.join()
    assert len(answered) == 5


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (("nobody", "test"), rpc.UnknownWorkerError, "nobody"),
        (("bob", ""), ValueError, "from 1 to 255 bytes"),
        (("bob", "x" * 256), ValueError, "from 1 to 255 bytes"),
        (("bob", 7), TypeError, "channel=7 is a int"),
        (("bob", "test", "text"), TypeError, "body='text' is a str, not bytes"),
        (("bob", "test", b"", [torch.ones(2), 7]), TypeError, "tensors=.* 7 is a int"),
        ((Life(1, 5), "test"), WorkerLostError, "that life of it is over"),
    ],
)
def test_what_cannot_be_posted_is_refused_before_anything_is_sent(
    pair: list[Agent], arguments: tuple[Any, ...], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        pair[0].worker.post(*arguments)


class Meeting:
    """Of a handler that waits and a message that it waits for."""

    def __init__(self) -> None:
        self.begun, self.came = threading.Event(), threading.Event()


def await_a_message() -> bool:
    meeting = extend.worker_state(Meeting, Meeting)
    extend.worker().let_others_read()
    meeting.begun.set()
    return meeting.came.wait(30.0)


def test_a_handler_that_lets_others_read_may_wait_for_a_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "TICK_SECONDS", 1e4)  # else its slowness is noticed anyway
    with local_group("alice", "bob", transport=TensorWireTransport) as (alice, bob):
        meeting = bob.worker.state(Meeting, Meeting)
        bob.worker.subscribe("test", lambda *_: meeting.came.set())
        waiting = alice.rpc_async("bob", await_a_message)
        assert meeting.begun.wait(60.0)
        alice.worker.post("bob", "test", b"")
        assert waiting.wait()


def test_a_channel_has_one_handler(pair: list[Agent]) -> None:
    pair[0].worker.subscribe("mine", print)
    with pytest.raises(ValueError, match="channel='mine' has a handler"):
        pair[0].worker.subscribe("mine", print)
    with pytest.raises(TypeError, match="handler"):
        pair[0].worker.subscribe("yours", "no function")  # type: ignore[arg-type]


# --- Send buffers


def total(tensor: torch.Tensor) -> float:
    return float(tensor.double().sum())


def address_at(tensor: torch.Tensor) -> tuple[float, bool]:
    return total(tensor), tensor.is_contiguous()


def filled_reply(value: float) -> torch.Tensor:
    result = extend.reply_buffer("alice", (4, LARGE))
    return result.fill_(value)


def is_lent(tensor: torch.Tensor) -> bool:
    """Tells whether a tensor lies in memory that torch did not allocate."""
    return not tensor.untyped_storage().resizable()


def shared_buffer(worker: extend.Worker, *shape: int) -> torch.Tensor:
    """A buffer in shared memory, which is there soon after the first large tensor was sent."""
    found: list[torch.Tensor] = []

    def get() -> bool:
        found[:] = [worker.send_buffer("bob", shape)]
        return is_lent(found[0])

    until(get)
    return found[0]


def test_a_send_buffer_holds_what_was_written_wherever_it_lies(pair: list[Agent]) -> None:
    alice, bob = pair
    taken = record(bob)
    for value in range(1, 6):
        for shape in ((3,), (4, LARGE)):
            buffer = alice.worker.send_buffer("bob", shape).fill_(value)
            assert alice.rpc_sync("bob", total, (buffer,)) == value * buffer.numel()
        posted = alice.worker.send_buffer(1, (LARGE,), torch.float64).fill_(value)
        alice.worker.post("bob", "test", b"", [posted])
        assert alice.rpc_sync("bob", filled_reply, (value,)).eq(value).all()
    until(lambda: len(taken) == 5)
    assert sorted(total(tensors[0]) for _, _, tensors in taken) == [
        value * LARGE for value in range(1, 6)
    ]


@pytest.mark.parametrize("size", [np.int64, torch.tensor])
def test_the_sizes_of_a_buffer_may_be_any_whole_numbers(
    pair: list[Agent], size: Callable[[int], Any]
) -> None:
    worker = pair[0].worker
    for buffer_for in (worker.send_buffer, worker.reply_buffer):
        assert buffer_for("bob", (size(2), size(LARGE))).shape == (2, LARGE)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "told"),
    [
        (5, torch.int8, TypeError, "shape=5 is not a list or tuple of whole numbers"),
        ((2.0,), torch.int8, TypeError, r"shape=\(2\.0,\) is not a list or tuple of whole"),
        ((2, -1), torch.int8, ValueError, r"shape=\(2, -1\) has a size below 0"),
        ((2,), "int8", TypeError, "dtype='int8' is a str, not a torch.dtype"),
        ((LARGE,), torch.qint8, ValueError, "dtype=torch.qint8 is quantized"),
    ],
)
def test_what_no_buffer_can_be_is_refused(
    pair: list[Agent], shape: Any, dtype: Any, error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        pair[0].worker.send_buffer("bob", shape, dtype)


@pytest.fixture
def wired() -> Iterator[list[Agent]]:
    """Two workers that share memory."""
    with local_group("alice", "bob", transport=TensorWireTransport) as agents:
        agents[0].rpc_sync("bob", total, (torch.ones(4 * LARGE),))
        yield agents


def test_a_send_buffer_is_sent_once_and_not_copied(wired: list[Agent]) -> None:
    worker = wired[0].worker
    taken = record(wired[1])
    buffer = shared_buffer(worker, LARGE).fill_(1)
    worker.post("bob", "test", b"", [buffer])
    until(lambda: bool(taken))
    received = taken[0][2][0]
    received.fill_(2)
    assert buffer.eq(2).all()  # the same memory
    with pytest.raises(EncodeError, match="is sent once"):
        worker.post("bob", "test", b"", [buffer])


def test_a_buffer_that_was_sent_stays_apart_from_the_next_while_either_end_has_it(
    wired: list[Agent],
) -> None:
    worker = wired[0].worker
    taken = record(wired[1])
    first = shared_buffer(worker, LARGE).fill_(1)
    worker.post("bob", "test", b"", [first])
    until(lambda: bool(taken))
    taken.clear()
    gc.collect()
    second = shared_buffer(worker, LARGE).fill_(2)
    assert first.eq(1).all()
    worker.post("bob", "test", b"", [second])
    del second
    until(lambda: bool(taken))
    third = shared_buffer(worker, LARGE).fill_(3)
    assert taken[0][2][0].eq(2).all()
    assert third.eq(3).all()


def test_a_buffer_that_could_not_be_sent_can_be_sent_later(wired: list[Agent]) -> None:
    worker = wired[0].worker
    taken = record(wired[1])
    buffer = shared_buffer(worker, LARGE).fill_(1)
    freed = torch.ones(LARGE)
    freed.untyped_storage().resize_(0)
    with pytest.raises(EncodeError):
        worker.post("bob", "test", b"", [buffer, freed])
    worker.post("bob", "test", b"", [buffer])
    until(lambda: bool(taken))
    assert taken[0][2][0].eq(1).all()


def test_memory_of_buffers_is_used_again(wired: list[Agent]) -> None:
    worker = wired[0].worker
    record_nothing = wired[1].worker.subscribe("test", lambda *_: None)
    shared_buffer(worker, 16 * LARGE)
    places = set()
    for _ in range(20):
        buffer = shared_buffer(worker, 16 * LARGE)
        places.add(buffer.data_ptr())
        worker.post("bob", "test", b"", [buffer])
        del buffer
        wired[0].rpc_sync("bob", gc.collect)
    assert len(places) < 10
    record_nothing()


# --- Store


def test_all_workers_see_the_keys_of_a_namespace(pair: list[Agent]) -> None:
    alice, bob = (agent.worker.store("mine") for agent in pair)
    alice.set("key", b"\xff\x00")
    assert bob.get("key") == b"\xff\x00"
    assert bob.compare_and_set("key", b"\xff\x00", b"2") == b"2"
    assert alice.compare_and_set("key", b"\xff\x00", b"3") == b"2"
    assert [alice.add("n"), bob.add("n", 4)] == [1, 5]
    with as_worker(pair[0]):
        assert extend.store("other").get("key") is None


def test_a_worker_that_left_has_no_store() -> None:
    with local_group("alice") as (alice,):
        pass
    with pytest.raises(AgentClosedError, match="left its group"):
        alice.worker.store("mine")


# --- Lives


def test_lives_say_who_is_there(pair: list[Agent]) -> None:
    alice, bob = pair
    events: list[extend.MembershipEvent] = []
    for one, other in ((alice, "bob"), (bob, "alice")):
        assert one.rpc_sync(other, count_up) == 1
    with as_worker(alice):
        extend.on_membership(events.append)
        life = extend.life_of("bob")
        assert (life, extend.worker().life) == (Life(1, 0), Life(0, 0))
        assert extend.is_living(life)
        assert not extend.is_living(Life(1, 1))
        bob.shutdown(graceful=False)
        until(lambda: not extend.is_living(life))
        until(lambda: bool(events))
        assert events[0].change is extend.MembershipChange.LEFT
        with pytest.raises(WorkerLostError):
            extend.life_of("bob")


def test_a_worker_that_was_gone_before_this_one_came_is_told_from_one_that_never_was() -> None:
    store, agents = HashStore(), list[Agent]()

    def come(name: str) -> Agent:
        options = TensorWireRpcBackendOptions(init_method="tcp://127.0.0.1:1", liveness_timeout=0)
        make = BackendType["TENSORWIRE"].value.init_backend_handler
        agents.append(make(store, name, len(agents), None, options))
        return agents[-1]

    try:
        alice, bob = come("alice"), come("bob")
        bob.shutdown(graceful=False)
        until(lambda: alice.group.living() == [alice.info])
        with as_worker(come("carol")):
            with pytest.raises(WorkerLostError, match=r"'bob'.* is gone"):
                extend.life_of("bob")
            with pytest.raises(UnknownWorkerError, match="name dave"):
                extend.life_of("dave")
    finally:
        for agent in agents:
            agent.shutdown(graceful=False)


# --- Processes


_taken: Taken = []


def begin_to_take() -> None:
    extend.subscribe("test", lambda *message: _taken.append(message))


def what_came(count: int) -> list[tuple[int, bytes, list[float]]]:
    until(lambda: len(_taken) >= count)
    return sorted(
        (life.worker, body, [total(t) for t in tensors]) for life, body, tensors in _taken
    )


def knows(worker: str) -> bool:
    try:
        return extend.life_of(worker) is not None
    except rpc.UnknownWorkerError:
        return False


def post_from_buffers(count: int) -> int:
    """Returns how many of the buffers lay in shared memory."""
    until(lambda: knows("b"))  # who joined first hears of the other some time later
    lent = 0
    for number in range(count):
        buffer = extend.send_buffer("b", (4, LARGE)).fill_(number)
        lent += is_lent(buffer)
        extend.post("b", "test", str(number).encode(), [buffer, torch.ones(2)])
        assert rpc.rpc_sync("b", count_up) == number + 1
    return lent


def use_store(worker: str) -> tuple[bytes | None, int, int]:
    store = extend.store("test")
    first = store.compare_and_set("first", None, worker.encode())
    return first, store.add("seen"), extend.life_of(worker).incarnation


@pytest.mark.slow
@pytest.mark.usefixtures("process_server")
@pytest.mark.parametrize(
    ("backend", "world_size"),
    [("TENSORPIPE", 2), ("TENSORPIPE", None), ("TENSORWIRE", 2), ("TENSORWIRE", None)],
)
def test_all_of_it_works_between_processes(backend: str, world_size: int | None) -> None:
    url = f"tcp://127.0.0.1:{free_port()}"
    a, b = WorkerProcess(), WorkerProcess()
    try:
        for rank, (name, process) in enumerate((("a", a), ("b", b))):
            process.begin(join, backend, url, name, rank, world_size)
        a.result(), b.result()
        b.do(begin_to_take)
        assert a.do(post_from_buffers, 20) > 0
        came = b.do(what_came, 20)
        assert sorted((int(body), sums) for _, body, sums in came) == [
            (number, [number * 4.0 * LARGE, 2.0]) for number in range(20)
        ]
        assert [a.do(use_store, "a"), b.do(use_store, "b")] == [(b"a", 1, 1), (b"a", 2, 1)]
        for process in (a, b):
            process.begin(leave)
        a.result(), b.result()
    finally:
        a.end()
        b.end()
