"""Picklers that programs look at or replace."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rpc
from rpc import api, internal
from rpc.agent import Agent
from rpc.functions import async_execution, idempotent
from rpc.testing import as_worker, local_group


@pytest.fixture
def alice() -> Iterator[Agent]:
    with local_group("alice", "bob") as (alice, _), as_worker(alice):
        yield alice


def test_a_value_comes_back_from_its_bytes_and_tensors():
    value = {"a": torch.arange(3), "b": [1, "x"]}
    data, tensors = internal.serialize(value)
    assert tensors[0] is value["a"]
    again = internal.deserialize(data, tensors)
    assert again["a"] is value["a"]
    assert again["b"] == value["b"]


class _Nested:
    def __getstate__(self) -> tuple[bytes, list[torch.Tensor]]:
        return internal.serialize(internal.PythonUDF(operator.add, (torch.ones(2), 1), None))

    def __setstate__(self, state: tuple[bytes, list[torch.Tensor]]) -> None:
        call = internal.deserialize(*state)
        self.result = call.func(*call.args)


def _result_of(nested: _Nested) -> torch.Tensor:
    return nested.result


def test_a_value_may_serialize_another_while_it_is_serialized(alice: Agent):
    assert rpc.rpc_sync("bob", _result_of, (_Nested(),)).tolist() == [2, 2]


def test_a_reference_cannot_be_serialized_outside_of_a_call(alice: Agent):
    with pytest.raises(RuntimeError, match="only in the arguments or the result of a call"):
        internal.serialize([rpc.RRef(1)])


def test_a_deleted_reference_says_that_it_was_deleted(alice: Agent):
    rref = rpc.remote("bob", operator.add, (1, 2))
    rref.to_here()
    api._delete_all_user_and_unforked_owner_rrefs()
    with pytest.raises(RuntimeError, match="Cannot call fork an UserRRef after deletion"):
        rref._serialize()


class _Counting(internal._InternalRPCPickler):
    def __init__(self) -> None:
        self.functions: list[object] = []

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        assert isinstance(obj, internal.PythonUDF)
        self.functions.append(obj.func)
        return super().serialize(obj)


@async_execution
def _async_add(a: int, b: int) -> torch.futures.Future[int]:
    future: torch.futures.Future[int] = torch.futures.Future()
    future.set_result(a + b)
    return future


def test_calls_are_serialized_by_the_pickler_in_use(alice: Agent):
    pickler = _Counting()
    with api._use_rpc_pickler(pickler):
        assert rpc.rpc_sync("bob", operator.sub, (3, 1)) == 2
        assert rpc.rpc_async("bob", _async_add, (3, 1)).wait() == 4
        assert rpc.remote("bob", max, ([1, 2],), {"key": operator.neg}).to_here() == 1
    assert rpc.rpc_sync("bob", operator.sub, (3, 1)) == 2
    assert pickler.functions == [operator.sub, _async_add, max]


def test_arguments_without_their_tuple_are_refused_past_the_pickler_in_use(alice: Agent):
    with (
        api._use_rpc_pickler(_Counting()),
        pytest.raises(TypeError, match="args='ab' is a str, not a tuple"),
    ):
        rpc.rpc_sync("bob", max, "ab")


@idempotent
def _negate(number: int) -> int:
    return -number


@idempotent
@async_execution
def _double(number: int) -> torch.futures.Future[int]:
    return _async_add(number, number)


def test_calls_are_tried_again_past_the_pickler_in_use(alice: Agent):
    again = rpc.Retry()
    with api._use_rpc_pickler(_Counting()):
        assert rpc.rpc_sync("bob", _negate, (3,), retry=again) == -3
        assert rpc.rpc_async("bob", _double, (3,), retry=again).wait() == 6
        assert rpc.remote("bob", _negate, (3,), retry=again).to_here() == -3
        with pytest.raises(ValueError, match=r"sub.* cannot be called with retry"):
            rpc.rpc_sync("bob", operator.sub, (3, 1), retry=again)


class _Returning(internal._InternalRPCPickler):
    def __init__(self, found: Any) -> None:
        self.found = found

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        found: tuple[bytes, list[torch.Tensor]] = self.found
        return found


@pytest.mark.parametrize("found", [None, 5, (b"",), ("text", []), (b"", None)])
def test_a_pickler_that_returns_what_it_must_not_is_named(alice: Agent, found: object):
    with (
        api._use_rpc_pickler(_Returning(found)),
        pytest.raises(TypeError, match=r"_Returning .* must return bytes and a list of tensors"),
    ):
        rpc.rpc_sync("bob", operator.sub, (3, 1))


@pytest.mark.parametrize("wrong", [None, 5, internal._InternalRPCPickler])
def test_what_is_no_pickler_is_not_used(alice: Agent, wrong: Any):
    with (
        api._use_rpc_pickler(wrong),  # torch's own tests set one that cannot serialize
        pytest.raises(TypeError, match="methods serialize and"),
    ):
        rpc.rpc_sync("bob", operator.sub, (3, 1))
    assert rpc.rpc_sync("bob", operator.sub, (3, 1)) == 2


def _read(first: rpc.RRef[int], more: dict[str, list[rpc.RRef[int]]]) -> list[object]:
    return [first.to_here(), *((rref.to_here(), rref.owner_name()) for rref in more["them"])]


def test_references_in_a_call_travel_past_the_pickler_in_use(alice: Agent):
    own, theirs = rpc.RRef(1), rpc.remote("bob", int, (2,))
    args = (own, {"them": [theirs, own]})
    expected = [1, (2, "bob"), (1, "alice")]
    with api._use_rpc_pickler(_Counting()):
        assert rpc.rpc_sync("bob", _read, args) == expected
        assert rpc.rpc_async("bob", _read, args).wait() == expected
        assert rpc.remote("bob", _read, args).to_here() == expected
        with pytest.raises(RuntimeError, match="only in the arguments or the result of a call"):
            internal.serialize([own])


class _Holder:
    def __init__(self, value: object) -> None:
        self.value = value

    def __getstate__(self) -> tuple[bytes, list[torch.Tensor]]:
        return internal.serialize(self.value)


def test_what_is_serialized_within_a_call_cannot_hold_references_of_its_own(alice: Agent):
    with (
        api._use_rpc_pickler(_Counting()),
        pytest.raises(RuntimeError, match="only in the arguments or the result of a call"),
    ):
        rpc.rpc_sync("bob", _read, (rpc.RRef(1), _Holder(rpc.RRef(2))))


def test_an_operator_that_does_not_fit_says_so_in_torchs_words_past_a_pickler(alice: Agent):
    with (
        api._use_rpc_pickler(_Counting()),
        pytest.raises(TypeError, match="Overloaded torch operator invoked from Python failed to"),
    ):
        rpc.rpc_sync("bob", torch.add, (1, 2, 3, 4))


def test_the_names_of_calls_in_profiles_are_the_originals():
    key = internal._build_rpc_profiling_key(internal.RPCExecMode.ASYNC, "f", "alice", "bob")
    assert key == "rpc_async#f(alice -> bob)"


def test_calls_of_a_block_are_waited_for_at_its_end(alice: Agent):
    with api._wait_all():
        futures = [rpc.rpc_async("bob", operator.add, (n, 1)) for n in range(10)]
    assert [future.done() for future in futures] == [True] * 10


def test_a_failed_call_of_a_block_raises_at_its_end(alice: Agent):
    with pytest.raises(ZeroDivisionError), api._wait_all():
        rpc.rpc_async("bob", operator.truediv, (1, 0))
    assert not hasattr(api._thread_local_var, "future_list")
