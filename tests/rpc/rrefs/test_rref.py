"""Remote references, as users hold them: creation, sharing, use, errors, freeing."""

from __future__ import annotations

import copy
import pickle
import threading
import weakref
from typing import Any, ClassVar

import pytest
import torch

import rpc
from rpc.agent import Agent
from rpc.errors import (
    EncodeError,
    FrameError,
    StaleRRefError,
)
from rpc.ids import GlobalId, Life, Reference
from rpc.outcomes.sinks import WaitingCaller
from rpc.rrefs.rref import RRef
from rpc.testing import MemoryHub, as_worker, local_group
from rpc.transports.base import Frame, FrameKind
from rpc.wire.control import Passage, Passed, encode_passed
from rpc.wire.messages import Operation, Request
from tests.rpc.rrefs.references import (
    SECONDS,
    Counter,
    eventually,
    identity,
    keep,
    kept_references,
    make_here,
    owned,
    read,
)


class DelaysCreations:
    def delay(self, source: int, destination: int, frame: Frame) -> float:
        if frame.kind is not FrameKind.REQUEST:
            return 0.0
        return 0.2 if Request.decode(frame.header).operation is Operation.CREATE else 0.0


def make_there(to: str, value: Any) -> RRef[Any]:
    return rpc.remote(to, identity, (value,))


def was_confirmed(rref: RRef[Any]) -> bool:
    return rref.confirmed_by_owner()


def read_kept(key: str) -> Any:
    return kept_references[key].to_here()


def drop(key: str) -> None:
    del kept_references[key]


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
