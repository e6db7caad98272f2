"""Remote references, as users hold them: creation, sharing, use, errors, freeing."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar

import pytest
import torch

import rpc
from rpc.agent import Agent
from rpc.errors import (
    AgentClosedError,
    EncodeError,
    FrameError,
    RemoteError,
    RpcTimeoutError,
    RRefCreationError,
    RRefDeletedError,
    RRefError,
    StaleRRefError,
    WorkerLostError,
)
from rpc.ids import GlobalId, Life, Reference
from rpc.outcomes.sinks import WaitingCaller
from rpc.rrefs.rref import RRef
from rpc.testing import MemoryHub, VirtualClock, as_worker, connect, local_group
from rpc.transports.base import Frame, FrameKind
from rpc.wire.control import Passage, Passed, encode_passed
from rpc.wire.messages import Operation, Request
from tests import waiting

SECONDS = 10.0

eventually = partial(waiting.eventually, meanwhile=gc.collect)


def bury_the_dead(agent: Agent) -> None:
    """Waits until the handles that were dropped so far are dealt with."""
    done = threading.Event()
    agent.references.do_later(done.set)
    assert done.wait(SECONDS)


def owned(agent: Agent) -> int:
    return agent.references.counts().num_owner_rrefs


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.value = start

    def add(self, amount: int) -> int:
        self.value += amount
        return self.value

    @rpc.functions.async_execution
    def add_later(self, to: str, amount: int) -> torch.futures.Future[int]:
        return rpc.rpc_async(to, int, (amount,)).then(lambda f: self.add(f.wait()))

    def fail(self) -> None:
        raise KeyError("nope")


class DelaysCreations:
    def delay(self, source: int, destination: int, frame: Frame) -> float:
        if frame.kind is not FrameKind.REQUEST:
            return 0.0
        return 0.2 if Request.decode(frame.header).operation is Operation.CREATE else 0.0


def make_here(value: Any) -> RRef[Any]:
    return RRef(value)


def make_there(to: str, value: Any) -> RRef[Any]:
    return rpc.remote(to, identity, (value,))


def identity(value: Any) -> Any:
    return value


def read(rref: RRef[Any]) -> Any:
    return rref.to_here()


def was_confirmed(rref: RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


_store: dict[str, RRef[Any]] = {}


def keep(key: str, rref: RRef[Any]) -> None:
    _store[key] = rref


def read_kept(key: str) -> Any:
    return _store[key].to_here()


def drop(key: str) -> None:
    del _store[key]


def kept(key: str) -> RRef[Any]:
    return _store[key]


def fail() -> None:
    raise ZeroDivisionError("on purpose")


# --- Making and using


def test_remote_keeps_the_value_at_its_owner(pair: list[Agent]) -> None:
    alice, bob = pair
    rref = alice.remote("bob", Counter, (5,))
    assert (rref.owner(), rref.owner_name(), rref.is_owner()) == (bob.info, "bob", False)
    assert rref.to_here().value == 5


def test_methods_are_called_through_the_reference_in_three_flavours(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    assert rref.rpc_sync().add(2) == 2
    assert rref.rpc_async().add(3).wait() == 5
    assert rref.remote().add(4).to_here() == 9
    assert rref.rpc_sync().add_later("alice", 1) == 10


class Recorder:
    """Shows what its method is called with."""

    def called(self, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs


class Layered:
    """Has callable attributes that its class does not have, and names that others use."""

    def __init__(self) -> None:
        self.layer = Counter().add

    def _rref(self) -> str:
        return "my _rref"

    _flavour = _timeout = _rref


def test_attributes_of_the_object_are_called_in_three_flavours(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Layered)
    assert rref.rpc_sync().layer(2) == 2
    assert rref.rpc_async().layer(3).wait() == 5
    assert rref.remote().layer(4).to_here() == 9


@pytest.mark.parametrize("name", ["_rref", "_flavour", "_timeout"])
def test_no_method_is_hidden_by_what_a_proxy_knows(pair: list[Agent], name: str) -> None:
    rref = pair[0].remote("bob", Layered)
    assert getattr(rref.rpc_sync(), name)() == "my _rref"


def test_a_method_may_have_parameters_of_any_name(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Recorder)
    expected = ((1, [2]), {"rref": 3, "name": "x", "args": (), "self_": None})
    assert rref.rpc_sync().called(1, [2], rref=3, name="x", args=(), self_=None) == expected
    assert rref.remote().called(1, [2], **expected[1]).to_here() == expected


def test_the_argument_of_a_method_that_cannot_be_sent_is_named(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Recorder)
    for arguments in ((1, threading.Lock()), (torch.ones(1), threading.Lock())):
        with pytest.raises(EncodeError, match=r"argument 1 \(_thread.lock\) of RRef.called"):
            rref.rpc_sync().called(*arguments)
    with pytest.raises(EncodeError, match=r"argument 'key' \(_thread.lock\) of RRef.called"):
        rref.rpc_sync().called(key=threading.Lock())


def test_a_reference_may_be_an_argument_of_its_own_method(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Recorder)
    arrived, _ = rref.rpc_sync().called(rref, "a")
    assert arrived[0].to_here().called(1) == ((1,), {})


def test_a_call_through_a_reference_makes_no_handle_at_the_owner(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, _ = pair
    counter = alice.remote("bob", Counter)
    made: list[Agent] = []
    bind = RRef._bind

    def note(rref: RRef[Any], keeper: Any, holding: Any) -> None:
        made.append(keeper.agent)
        bind(rref, keeper, holding)

    monkeypatch.setattr(RRef, "_bind", note)
    assert counter.rpc_sync().add(2) == 2
    assert counter.rpc_async().add(3).wait() == 5
    assert counter.to_here().value == 5
    assert counter.rpc_sync().add(amount=1) == 6
    assert made == []


def test_a_call_through_a_reference_waits_for_a_creation_that_it_overtook() -> None:
    with local_group("alice", "bob", hub=MemoryHub(script=DelaysCreations())) as (alice, bob):
        counter = alice.remote("bob", Counter, (7,))
        assert counter.rpc_sync().add(1) == 8
        del counter
        eventually(lambda: owned(bob) == 0)


def test_a_reference_whose_owner_was_replaced_is_stale_before_anything_is_sent(
    pair: list[Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    alice, bob = pair
    counter = alice.remote("bob", Counter)
    assert counter.rpc_sync().add(1) == 1
    later = Life(bob.info.id, bob.life.incarnation + 1)
    monkeypatch.setitem(alice.group.living_now, bob.info.id, later)
    with pytest.raises(StaleRRefError, match="its owner was replaced by a later life"):
        counter.rpc_sync().add(1)
    monkeypatch.undo()
    assert counter.rpc_sync().add(1) == 2
    assert alice.references.counts().num_borrows == 0


@pytest.mark.parametrize("passage", [Passage.GRANT, Passage.CHILD])
def test_a_request_made_through_anything_but_a_borrowed_reference_is_refused(
    pair: list[Agent], passage: Passage
) -> None:
    alice, bob = pair
    reference = Reference(GlobalId(0, 0, 99), bob.life, 99)
    target = encode_passed((Passed(reference, GlobalId(0, 0, 100), passage),))
    sink = WaitingCaller()
    request = Operation.METHOD, bob.info, (), 5, sink, target, "RRef.add", b"add"
    with pytest.raises(FrameError, match="can only be made through a borrowed reference"):
        alice.caller.run(sink, alice.caller.request, *request)


def test_an_unknown_attribute_is_an_attribute_error_at_the_caller(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    for call in (
        lambda: rref.rpc_sync().missing(),
        lambda: rref.rpc_async().missing().wait(),
        lambda: rref.remote().missing(),
    ):
        with pytest.raises(AttributeError, match="has no attribute 'missing'"):
            call()


def test_the_owner_sees_the_object_itself(pair: list[Agent]) -> None:
    with as_worker(pair[0]):
        value = Counter()
        rref = RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.local_value() is value
    assert rref.to_here() is value
    assert rref.rpc_sync().add(2) == 2
    assert value.value == 2


def test_remote_to_oneself_makes_an_owner(pair: list[Agent]) -> None:
    rref = pair[0].remote("alice", Counter, (3,))
    assert rref.is_owner()
    assert rref.local_value().value == 3
    del rref
    assert eventually(lambda: owned(pair[0]) == 0)


def test_local_value_off_the_owner_says_where_to_call_it(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    with pytest.raises(
        RuntimeError,
        match=r"For UserRRef\(rref_id=.*can't call localValue\(\) on user "
        r"WorkerInfo\(id=0, name=alice\)\. Call it on owner WorkerInfo\(id=1, name=bob\)",
    ):
        rref.local_value()


def test_names_of_references_count_from_zero(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    assert str(rref) == (
        "UserRRef(RRefId = GloballyUniqueId(created_on=0, local_id=0), "
        "ForkId = GloballyUniqueId(created_on=0, local_id=1))"
    )
    with as_worker(pair[0]):
        assert str(RRef(1)) == "OwnerRRef(GloballyUniqueId(created_on=0, local_id=2))"


def test_a_reference_needs_an_agent() -> None:
    with pytest.raises(RuntimeError, match="Current RPC agent is not set"):
        RRef(1)


@pytest.mark.parametrize(
    "how", [pickle.dumps, copy.copy, copy.deepcopy, lambda r: torch.save(r, "/dev/null")]
)
def test_a_reference_cannot_be_pickled_outside_rpc(pair: list[Agent], how: Any) -> None:
    with as_worker(pair[0]):
        rref = RRef(1)
    with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
        how(rref)


def test_get_future_is_done_when_the_owner_has_run_the_function(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    assert rref._get_future().wait() is None
    assert rref.confirmed_by_owner()


def test_get_type_asks_the_owner(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    assert rref._get_type() is Counter
    assert rref._get_type(blocking=False).wait() is Counter


# --- Sharing


def test_references_travel_as_arguments_results_and_inside_containers(
    make_group: Any,
) -> None:
    alice, bob, _ = make_group("alice", "bob", "carol")
    rref = alice.remote("bob", identity, (7,))
    assert alice.rpc_sync("carol", read, (rref,)) == 7
    assert alice.rpc_sync("bob", read, (rref,)) == 7
    assert alice.rpc_sync("carol", identity, ({"k": [rref]},))["k"][0].to_here() == 7
    assert alice.rpc_sync("bob", make_here, (8,)).to_here() == 8
    assert alice.rpc_sync("carol", make_there, ("bob", 9)).to_here() == 9
    back = alice.rpc_sync("carol", make_there, ("alice", 10))
    assert back.is_owner()
    assert back.local_value() == 10
    del rref, back
    assert eventually(lambda: owned(bob) == 0 and owned(alice) == 0)


def test_references_to_references_unwrap_one_by_one(make_group: Any) -> None:
    alice, _, _ = make_group("alice", "bob", "carol")
    inner = alice.remote("bob", identity, (5,))
    outer = alice.remote("carol", identity, (inner,))
    assert outer.to_here().to_here() == 5


def test_a_reference_passed_on_is_confirmed_before_the_receiver_runs(make_group: Any) -> None:
    alice, _, _ = make_group("alice", "bob", "carol")
    for _ in range(20):
        rref = alice.remote("bob", identity, (1,))
        assert alice.rpc_sync("carol", was_confirmed, (rref,))


def test_a_value_lives_while_anyone_refers_to_it_and_no_longer(make_group: Any) -> None:
    alice, bob, _ = make_group("alice", "bob", "carol")
    rref = alice.remote("bob", identity, (3,))
    alice.rpc_sync("carol", keep, ("a", rref))
    del rref
    assert eventually(lambda: alice.references.counts().num_user_rrefs == 0)
    assert alice.rpc_sync("carol", read_kept, ("a",)) == 3
    alice.rpc_sync("carol", drop, ("a",))
    assert eventually(lambda: owned(bob) == 0)


class Marker:
    """Something whose end can be seen."""


_markers: list[weakref.ref[Marker]] = []


def make_marker() -> Marker:
    marker = Marker()
    _markers.append(weakref.ref(marker))
    return marker


def test_the_object_itself_is_freed(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", make_marker)
    rref._get_future().wait()
    assert _markers[-1]() is not None
    del rref
    assert eventually(lambda: _markers[-1]() is None)


class Caller:
    """Makes a call as it ends."""

    ended = threading.Event()
    results: ClassVar[list[object]] = []

    def __del__(self) -> None:
        Caller.results.append(rpc.rpc_sync("alice", abs, (-1,), timeout=SECONDS))
        Caller.ended.set()


def test_a_value_may_make_a_call_as_it_is_freed(pair: list[Agent]) -> None:
    Caller.ended.clear()
    Caller.results.clear()
    rref = pair[0].remote("bob", Caller)
    rref._get_future().wait()
    del rref
    assert Caller.ended.wait(2 * SECONDS)
    assert Caller.results == [1]


def test_thousands_of_references_come_and_go(pair: list[Agent]) -> None:
    alice, bob = pair
    for _ in range(5):
        rrefs = [alice.remote("bob", identity, (i,)) for i in range(300)]
        assert [r.to_here() for r in rrefs[::50]] == list(range(0, 300, 50))
        del rrefs
    assert eventually(lambda: owned(bob) == 0, seconds=60)
    counts = alice.references.counts()
    assert (counts.num_user_rrefs, counts.num_pending_children, counts.num_borrows) == (0, 0, 0)


# --- Errors


def test_to_here_raises_what_the_creator_raised_and_does_so_again(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="on purpose"):
            rref.to_here()


def leave(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("error", [KeyboardInterrupt("now"), SystemExit(0), GeneratorExit()])
@pytest.mark.parametrize("owner", ["alice", "bob"])
def test_a_creator_that_would_end_the_thread_is_a_remote_error_for_all(
    pair: list[Agent], owner: str, error: BaseException
) -> None:
    rref = pair[0].remote(owner, leave, (error,))
    with pytest.raises(RemoteError, match=f"^{type(error).__name__}"):
        rref.to_here()
    with pytest.raises(RemoteError, match=f"^{type(error).__name__}"):
        pair[0].rpc_sync(owner, read_locally, (rref,))
    with pytest.raises(RemoteError, match=f"^{type(error).__name__}"):
        rref.rpc_sync().anything()


def read_locally(rref: RRef[Any]) -> Any:
    return rref.local_value()


def test_a_call_through_a_failed_reference_raises_the_creators_error(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", fail)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        rref.rpc_sync().anything()


def test_a_method_error_leaves_the_reference_usable(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", Counter)
    with pytest.raises(KeyError, match="nope"):
        rref.rpc_sync().fail()
    assert rref.rpc_sync().add(1) == 1


_gate = threading.Event()
_at_the_gate: list[None] = []


def wait_at_the_gate() -> int:
    _at_the_gate.append(None)
    _gate.wait(20)
    return 1


def test_a_timed_out_to_here_may_be_repeated() -> None:
    _gate.clear()
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _):
        rref = alice.remote("bob", wait_at_the_gate)
        errors: list[BaseException] = []

        def fetch() -> None:
            try:
                rref.to_here(timeout=0.5)
            except RpcTimeoutError as error:
                errors.append(error)

        thread = threading.Thread(target=fetch)
        thread.start()
        assert eventually(lambda: len(alice.caller.outstanding()) == 2)
        clock.advance(1)
        thread.join(10)
        assert "RPC ran for more than" in str(errors[0])
        _gate.set()
        assert rref.to_here() == 1


@pytest.fixture
def closed_gate() -> Iterator[None]:
    _gate.clear()
    _at_the_gate.clear()
    yield
    _gate.set()


@pytest.mark.usefixtures("closed_gate")
def test_a_creation_that_failed_is_logged_once_if_its_reference_was_dropped_unread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _):
        kept = alice.remote("bob", wait_at_the_gate, timeout=1)
        for owner in ("alice", "bob"):
            alice.remote(owner, wait_at_the_gate, timeout=1)  # dropped at once
        bury_the_dead(alice)
        clock.advance(2)
        assert eventually(lambda: len(caplog.records) == 2)
        assert eventually(lambda: alice.references.creations.under_way() == 0)
        del kept
        assert eventually(lambda: len(caplog.records) == 3)
        _gate.set()
    told = "a remote() failed and nobody looked: RpcTimeoutError: RPC ran for more than set timeout"
    assert [record.getMessage().startswith(told) for record in caplog.records] == [True] * 3


@pytest.mark.usefixtures("closed_gate")
@pytest.mark.parametrize("owner", ["alice", "bob"])
@pytest.mark.parametrize(
    "look",
    [
        lambda rref: rref.to_here(),
        lambda rref: rref.rpc_sync().bit_count(),
        lambda rref: rref._get_future().wait(),
        lambda rref: rpc.rpc_sync("bob", identity, (rref,)),
    ],
    ids=["to_here", "rpc_sync", "future", "argument"],
)
def test_a_creation_that_failed_is_not_logged_if_somebody_looked(
    owner: str, look: Callable[[RRef[Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, _), as_worker(alice):
        rref = alice.remote(owner, wait_at_the_gate, timeout=1)
        clock.advance(2)
        assert eventually(lambda: alice.references.creations.under_way() == 0)
        with pytest.raises(RuntimeError):
            look(rref)
        del rref
        bury_the_dead(alice)
        _gate.set()
    assert caplog.text == ""


@pytest.mark.usefixtures("closed_gate")
@pytest.mark.parametrize("owner", ["alice", "bob"])
@pytest.mark.parametrize(
    "look",
    [lambda rref: rref.to_here(0), lambda rref: rref.rpc_async(0).bit_count().wait()],
    ids=["to_here", "method"],
)
def test_what_waits_for_a_value_fails_when_its_creation_times_out(
    owner: str, look: Callable[[RRef[Any]], object]
) -> None:
    clock = VirtualClock()
    failed: list[BaseException] = []

    def wait() -> None:
        with as_worker(alice), pytest.raises(RRefCreationError) as caught:
            look(rref)
        failed.append(caught.value)

    with local_group("alice", "bob", clock=clock) as (alice, _):
        others = alice.remote("bob", wait_at_the_gate, timeout=0).rpc_async(0).bit_count()
        rref = alice.remote(owner, wait_at_the_gate, timeout=1)
        thread = threading.Thread(target=wait)
        thread.start()
        place = rref._holding.value
        if place is None:
            assert eventually(lambda: len(alice.caller.outstanding()) == 4)
        else:
            assert eventually(lambda: place.waiters() == 1)
        # One that has not begun by then fails by itself, with another error.
        assert eventually(lambda: len(_at_the_gate) == 2)
        clock.advance(2)
        thread.join(SECONDS)
        told = "RRef creation failed: RPC ran for more than set timeout (1000 ms)"
        assert [str(error)[: len(told)] for error in failed] == [told]
        _gate.set()
        assert others.wait() == 1


def test_a_reference_whose_creation_timed_out_raises_on_every_use_and_is_freed() -> None:
    _gate.clear()
    clock = VirtualClock()
    with local_group("alice", "bob", clock=clock) as (alice, bob):
        rref = alice.remote("bob", wait_at_the_gate, timeout=0.5)
        clock.advance(1)
        with pytest.raises(RuntimeError, match="RPC ran for more than"):
            rref._get_future().wait()
        for use in (rref.to_here, lambda: rref.rpc_sync().bit_length()):
            with pytest.raises(RRefCreationError, match="RRef creation"):
                use()
        with pytest.raises(RRefCreationError, match="RRef creation"):
            alice.rpc_sync("bob", identity, (rref,))
        _gate.set()
        assert eventually(lambda: owned(bob) == 0)


def test_a_reference_to_a_lost_owner_raises_at_once() -> None:
    hub = MemoryHub()
    with local_group("alice", "bob", hub=hub) as (alice, _):
        rref = alice.remote("bob", Counter)
        rref._get_future().wait()
        hub.cut(1)
        assert eventually(lambda: not alice.references.counts().num_user_rrefs)
        for use in (rref.to_here, rref.rpc_sync().add):
            with pytest.raises(WorkerLostError, match="'bob'"):
                use(1)
        with pytest.raises(WorkerLostError, match="'bob'"):
            alice.rpc_sync("alice", identity, (rref,))


def test_the_forks_of_a_lost_user_are_released() -> None:
    hub = MemoryHub()
    with local_group("alice", "bob", "carol", hub=hub) as (alice, bob, _):
        rref = alice.remote("bob", identity, (1,))
        alice.rpc_sync("carol", keep, ("lost", rref))
        del rref
        assert eventually(lambda: alice.references.counts().num_user_rrefs == 0)
        assert owned(bob) == 1
        hub.cut(2)
        assert eventually(lambda: owned(bob) == 0)
        _store.pop("lost")


def test_shutdown_deletes_references_that_are_still_held() -> None:
    alice, bob = connect("alice", "bob")
    rref = alice.remote("bob", Counter)
    threads = [threading.Thread(target=agent.shutdown) for agent in (alice, bob)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert (alice.group_shutdown.leaks, bob.group_shutdown.leaks) == ([], [])
    with pytest.raises(
        RRefDeletedError, match=r"has been deleted\. Cannot call to_here\(\) on it after deletion"
    ):
        rref.to_here()


def test_the_place_of_a_value_whose_request_could_not_be_sent_is_freed(pair: list[Agent]) -> None:
    for owner in pair:
        with pytest.raises(RuntimeError, match="argument 0"):
            pair[0].remote(owner.info, identity, (threading.Lock(),))
    assert eventually(lambda: owned(pair[0]) == owned(pair[1]) == 0)


# --- References of another session, or of another worker in this process


SHUT_DOWN = r"is stale: it was made or received by worker 'alice' .* which shut down"


class Silent(Exception):
    """Answers for none of its attributes."""

    def __getattribute__(self, name: str) -> object:
        raise RuntimeError(f"nobody asks for {name}")


def fail_silently() -> None:
    raise Silent("x")


def test_a_creation_whose_error_answers_for_nothing_fails_at_once() -> None:
    with local_group("alice", "bob") as (alice, bob):
        with pytest.raises(RemoteError, match="Silent"):
            alice.remote("bob", fail_silently).to_here(SECONDS)
        assert eventually(lambda: not bob.debug_info()["serving"])


def test_what_was_lent_to_a_call_of_a_worker_that_closed_comes_back() -> None:
    with local_group("alice", "bob") as (alice, _):
        rref = alice.remote("bob", identity, (5,))
        assert rref.to_here() == 5
        before = alice.references.counts()
        alice.caller.close("this worker shut down")
        with pytest.raises(AgentClosedError, match="this worker shut down"):
            alice.rpc_sync("bob", identity, (rref,))
        assert alice.references.counts() == before


@pytest.fixture
def of_another_session() -> dict[str, RRef[Any]]:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        own, user = RRef("old own"), alice.remote("bob", identity, ("old user",))
        adopted = alice.rpc_sync("bob", make_here, ("old adopted",))
        created_here = alice.remote("alice", identity, ("old created here",))
        assert user.to_here() == "old user"
        assert created_here.to_here() == "old created here"
    return {"own": own, "user": user, "adopted": adopted, "created here": created_here}


@pytest.fixture
def next_session(
    of_another_session: dict[str, RRef[Any]],
) -> Iterator[tuple[Agent, Agent]]:
    """A group of the same names, whose references have the same ids."""
    with local_group("alice", "bob") as (alice, bob), as_worker(alice):
        new = [RRef("new own"), *(alice.remote("bob", identity, ("new",)) for _ in range(4))]
        assert alice.rpc_sync("bob", read, (new[0],)) == "new own"
        assert str(of_another_session["own"]) == str(new[0])
        yield alice, bob
        del new
        assert eventually(lambda: owned(alice) == owned(bob) == 0)
        assert alice.references.counts() == bob.references.counts()


class Carrier:
    def __init__(self, rref: RRef[Any]) -> None:
        self.inside = [{"it": rref}]


@pytest.mark.parametrize("which", ["own", "user", "adopted", "created here"])
@pytest.mark.parametrize(
    "send",
    [
        lambda rref: rpc.rpc_sync("bob", read, (rref,)),
        lambda rref: rpc.rpc_sync("alice", read, (rref,)),
        lambda rref: rpc.rpc_async("bob", read, (rref,)).wait(),
        lambda rref: rpc.remote("bob", read, (rref,)).to_here(),
        lambda rref: rpc.rpc_sync("bob", identity, kwargs={"value": [Carrier(rref)]}),
        lambda rref: rpc.rpc_sync("bob", lambda: rref.to_here()),
        lambda rref: rpc.remote("bob", Counter).rpc_sync().add(rref),
        lambda rref: rpc.remote("alice", identity, (rref,)),
        lambda rref: rpc.rpc_sync("bob", read, (RRef(0), rref)),
    ],
    ids=["sync", "self", "async", "remote", "inside", "cloud", "proxy", "own remote", "second"],
)
def test_a_reference_of_an_earlier_session_is_stale_before_anything_is_sent(
    which: str,
    send: Callable[[RRef[Any]], object],
    of_another_session: dict[str, RRef[Any]],
    next_session: tuple[Agent, Agent],
) -> None:
    with pytest.raises(StaleRRefError, match=SHUT_DOWN):
        send(of_another_session[which])


@pytest.mark.usefixtures("next_session")
def test_a_reply_with_a_reference_of_an_earlier_session_is_an_error(
    of_another_session: dict[str, RRef[Any]],
) -> None:
    _store["old"] = of_another_session["own"]
    try:
        with pytest.raises(StaleRRefError, match=SHUT_DOWN):
            rpc.rpc_sync("bob", kept, ("old",))
        with pytest.raises(StaleRRefError, match=SHUT_DOWN):
            rpc.remote("bob", kept, ("old",)).to_here()
    finally:
        del _store["old"]


@pytest.mark.usefixtures("next_session")
def test_what_a_reference_of_an_earlier_session_answers_is_of_that_session(
    of_another_session: dict[str, RRef[Any]],
) -> None:
    own, user = of_another_session["own"], of_another_session["adopted"]
    assert (own.local_value(), own.owner_name(), user.owner_name()) == ("old own", "alice", "bob")
    for use in (
        user.to_here,
        lambda: user.rpc_sync().upper(),
        lambda: user.rpc_async().upper().wait(),
        lambda: user.remote().upper(),
        lambda: own.rpc_sync().upper(),
        lambda: own.rpc_async().upper().wait(),
        lambda: own.remote().upper().to_here(),
    ):
        with pytest.raises((AgentClosedError, RRefDeletedError), match="this worker shut down"):
            use()


def test_a_reference_of_another_worker_of_the_process_is_refused(pair: list[Agent]) -> None:
    alice, bob = pair
    with as_worker(alice):
        rref = RRef("alice's")
    told = r"by worker 'alice' .*, and cannot be sent by worker 'bob'"
    for to in ("alice", "bob"):
        with pytest.raises(RRefError, match=told):
            bob.rpc_sync(to, read, (rref,))
    assert alice.rpc_sync("bob", read, (rref,)) == "alice's"


# --- Backward


def make_loss() -> torch.Tensor:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    _leaves.append(x)
    return (x * x).sum()


_leaves: list[torch.Tensor] = []


def test_local_backward_at_the_owner_goes_into_grad(pair: list[Agent]) -> None:
    with as_worker(pair[0]):
        RRef(make_loss()).backward()
    assert _leaves[-1].grad is not None
    assert _leaves[-1].grad.tolist() == [2.0, 4.0]


def test_backward_of_a_user_needs_a_context(pair: list[Agent]) -> None:
    rref = pair[0].remote("bob", make_loss)
    with pytest.raises(RuntimeError, match="User RRefs require 'dist_autograd_ctx_id'"):
        rref.backward()


def test_backward_needs_a_tensor(pair: list[Agent]) -> None:
    with as_worker(pair[0]), pytest.raises(RuntimeError, match="RRef should contain a tensor"):
        RRef("text").backward()
