"""Values survive the codec; tensors and references travel beside them; errors name the culprit."""

from __future__ import annotations

import collections
import copy
import datetime
import enum
import functools
import json
import operator
import pickle
import re
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rpc.errors import DecodeError, EncodeError, RRefDeletedError
from rpc.wire import codec
from rpc.wire.codec import ImportNeeded, decode, decode_loaded, encode
from rpc.wire.simple_values import Encoded, OutOfBandHandle
from rpc.worker_info import WorkerInfo
from tests.rpc.round_trips import round_trip, round_trip_detached


def double(x: Any) -> Any:
    return 2 * x


def label(value: object) -> str:
    """A name for a parameter that is the same in every process."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


class Color(enum.Enum):
    RED = 1


class Pair(NamedTuple):
    left: Tensor
    right: int


@dataclass
class Box:
    content: object

    def get(self) -> object:
        return self.content

    @classmethod
    def of(cls, content: object) -> Box:
        return cls(content)

    @staticmethod
    def describe(content: object) -> str:
        return f"box of {content}"


class Handle(OutOfBandHandle):
    """Like an RRef: travels by index, refuses pickle and copy."""

    def __reduce__(self) -> Any:
        raise RuntimeError("Can not pickle rref in python pickler")


class Labelled(Tensor):
    """A tensor subclass that adds nothing but attributes."""


class Local:
    """Sendable, but not picklable."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        raise RuntimeError("only in calls")

    def __rpc_reduce__(self) -> Any:
        return Local, (self.value,)


class RaisesOnPickling:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __getstate__(self) -> Any:
        raise self.error


class RaisesOnArrival:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __setstate__(self, state: dict[str, Exception]) -> None:
        raise state["error"]

    def __getstate__(self) -> object:
        return {"error": self.error}


class Nested:
    """Encodes a value of its own while it is encoded."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __getstate__(self) -> Encoded:
        return encode(("inner", self.tensor))

    def __setstate__(self, state: Encoded) -> None:
        _, self.tensor = decode(state.payload, state.tensors, state.references)


# Functions and classes


@pytest.mark.parametrize(
    "function",
    [
        double,
        Box,
        Box.of,
        Box.describe,
        torch.add,
        torch.nn.functional.relu,
        torch.ops.aten.relu,
        torch.ops.aten.add.Tensor,
        len,
        Tensor.add,
        collections.OrderedDict,
    ],
    ids=label,
)
def test_importable_callables_arrive_as_the_same_object(function: Callable[..., Any]) -> None:
    assert round_trip(function) == function


def test_bound_methods_and_partials_arrive_with_their_object() -> None:
    assert round_trip(Box(7).get)() == 7
    assert round_trip(torch.ones(2).sum)().item() == 2.0
    assert round_trip(functools.partial(double, 4))() == 8


def test_lambdas_closures_and_local_classes_travel_by_value() -> None:
    offset = torch.ones(2)

    class Adder:
        def __call__(self, x: Tensor) -> Tensor:
            return x + offset

    assert round_trip(lambda x: x + offset)(1).tolist() == [2.0, 2.0]
    assert round_trip(Adder())(torch.ones(2)).tolist() == [2.0, 2.0]
    assert round_trip(lambda: double(3))() == 6


def test_tensors_and_references_in_closures_travel_out_of_band() -> None:
    big, handle = torch.zeros(10_000), Handle()
    encoded = encode(lambda: (big, handle))
    assert encoded.tensors == [big]
    assert encoded.references == [handle]
    assert len(encoded.payload) < 2_000


@pytest.fixture
def main_module(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A main module with a counter and a function that reads it, as a script has."""
    module = types.ModuleType("__main__")
    exec("count = 0\ndef get_count():\n    return count\nclass State:\n    pass", vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_functions_of_a_script_use_the_receivers_globals(main_module: Any) -> None:
    main_module.__file__ = "train.py"
    encoded = encode((main_module.get_count, main_module.State()))
    main_module.count = 5
    function, state = decode(encoded.payload, (), ())
    assert function() == 5
    assert type(state) is main_module.State


def test_functions_of_a_script_go_by_reference_beside_a_lambda(main_module: Any) -> None:
    main_module.__file__ = "train.py"
    function, _ = round_trip((main_module.get_count, lambda: 0))
    assert function is main_module.get_count


@pytest.mark.parametrize("name", ["get_count", "State"])
@pytest.mark.parametrize("file", [None, "<stdin>"])
def test_what_a_notebook_defines_travels_by_value(
    main_module: Any, name: str, file: str | None
) -> None:
    if file is not None:
        main_module.__file__ = file
    encoded = encode(getattr(main_module, name))
    delattr(main_module, name)
    assert decode(encoded.payload, (), ()).__name__ == name


def test_instances_of_a_notebooks_classes_travel_by_value(main_module: Any) -> None:
    encoded = encode([main_module.State()])
    assert not encoded.plain
    del main_module.State
    assert type(decode(encoded.payload, (), ())[0]).__name__ == "State"


def test_functions_of_a_spawned_script_are_found_where_it_runs_directly(
    main_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    main_module.__file__ = "train.py"
    main_module.get_count.__module__ = "__mp_main__"
    monkeypatch.setitem(sys.modules, "__mp_main__", main_module)
    encoded = encode(main_module.get_count)
    monkeypatch.delitem(sys.modules, "__mp_main__")
    assert decode(encoded.payload, (), ()) is main_module.get_count
    assert decode_loaded(encoded.payload, (), ()) is main_module.get_count


@pytest.mark.parametrize("missing", ["module", "function"])
def test_a_function_missing_here_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    module = types.ModuleType("only_at_the_sender")
    exec("def work(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_at_the_sender", module)
    encoded = encode(vars(module)["work"])
    if missing == "module":
        monkeypatch.delitem(sys.modules, "only_at_the_sender")
    else:
        del vars(module)["work"]
    with pytest.raises(DecodeError, match="RPC pickler does not serialize") as caught:
        decode(encoded.payload, (), ())
    assert "'work' of module 'only_at_the_sender'" in str(caught.value)


# Values


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, 2.5, "ü", b"\x00", {3}, (None, True)]},
        Color.RED,
        Box([Box(1)]),
        WorkerInfo("w", 3),
        torch.float32,
        torch.device("cuda", 1),
        torch.Size([1, 2]),
        torch.strided,
        datetime.timedelta(seconds=3),
        collections.OrderedDict(a=1),
        range(3),
        1 + 2j,
        ValueError("text").args,
    ],
    ids=label,
)
def test_values_arrive_equal(value: object) -> None:
    assert round_trip(value) == value


def test_a_shared_object_stays_shared() -> None:
    shared = [torch.ones(1)]
    first, second = round_trip((shared, shared))
    assert first is second


def test_numpy_arrays_arrive_equal() -> None:
    array = np.arange(6.0).reshape(2, 3)
    assert np.array_equal(round_trip(array), array)
    assert encode(array).plain


def test_encoding_inside_encoding_keeps_the_tables_apart() -> None:
    outer, inner = torch.zeros(1), torch.ones(1)
    first, nested, second = round_trip((outer, Nested(inner), outer))
    assert (first.item(), nested.tensor.item(), second.item()) == (0.0, 1.0, 0.0)
    assert first is second


def test_types_may_be_sendable_without_being_picklable() -> None:
    assert round_trip([Local(4)])[0].value == 4
    with pytest.raises(RuntimeError, match="only in calls"):
        pickle.dumps(Local(4))


def test_modules_arrive_with_their_parameters_out_of_band() -> None:
    module = nn.Linear(3, 2)
    encoded = encode(module)
    assert all(
        sent is kept for sent, kept in zip(encoded.tensors, module.parameters(), strict=True)
    )
    arrived = decode(encoded.payload, encoded.tensors, ())
    assert arrived.weight is module.weight


# Tensors and references


def test_tensors_are_listed_once_as_the_user_passed_them() -> None:
    leaf = torch.ones(2, requires_grad=True)
    derived = leaf * 2
    parameter = nn.Parameter(torch.ones(1))
    encoded = encode({"a": derived, "b": [leaf, derived], "c": parameter})
    assert [id(tensor) for tensor in encoded.tensors] == [id(derived), id(leaf), id(parameter)]


def test_replaced_tensors_take_the_place_of_those_sent() -> None:
    encoded = encode(Pair(torch.zeros(2), 3))
    replacement = torch.ones(1)
    assert decode(encoded.payload, [replacement], ()).left is replacement


def test_references_are_listed_once_and_taken_from_the_table() -> None:
    handle = Handle()
    encoded = encode([handle, {"again": handle}])
    assert encoded.references == [handle]
    other = Handle()
    first, rest = decode(encoded.payload, (), [other])
    assert first is other
    assert rest["again"] is other


def test_references_stay_unpicklable_elsewhere() -> None:
    with pytest.raises(RuntimeError, match="Can not pickle rref"):
        copy.copy(Handle())


def test_buffers_arrive_as_buffers() -> None:
    for persistent in (True, False):
        arrived = round_trip_detached(nn.Buffer(torch.ones(2), persistent=persistent))
        assert isinstance(arrived, nn.Buffer)
        assert arrived.persistent is persistent


def test_tensor_subclasses_keep_their_class_and_attributes() -> None:
    sent = torch.ones(2).as_subclass(Labelled)
    sent.label = "x"
    encoded = encode(sent)
    arrived = decode(encoded.payload, [t.detach() for t in encoded.tensors], ())
    assert type(arrived) is Labelled
    assert arrived.label == "x"
    assert [type(tensor) for tensor in encoded.tensors] == [Tensor]
    leaf = round_trip_detached(sent.clone().detach().requires_grad_())
    assert type(leaf) is Labelled
    assert leaf.requires_grad
    assert leaf.is_leaf


# TorchScript


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_modules_arrive_working() -> None:
    module = torch.jit.script(nn.Linear(2, 1))
    x = torch.ones(1, 2)
    arrived = round_trip({"model": module})["model"]
    assert torch.equal(arrived(x), module(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_script_functions_go_by_name_if_they_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = torch.jit.script(double_tensor)
    assert round_trip(scripted)(torch.ones(1)).item() == 2.0
    monkeypatch.setattr(sys.modules[__name__], "double_tensor", scripted)
    assert scripted_name(scripted) == f"{__name__}.double_tensor"
    assert round_trip(scripted) is scripted


def double_tensor(x: Tensor) -> Tensor:
    return x * 2


def scripted_name(function: Any) -> str:
    return str(function.qualified_name.removeprefix("__torch__."))


# Plainness


@pytest.mark.parametrize(
    "value",
    [
        (double, (1, "a", None), {"x": [torch.ones(1), nn.Parameter(torch.ones(1))]}),
        (torch.add, (torch.float32, torch.device("cpu"), torch.Size([2])), {}),
        (Box, (Handle(),), {}),
        (len, (collections.OrderedDict(a=1), collections.deque([1])), {}),
        np.float32(1.5),
        functools.partial(double, 1),
    ],
)
def test_native_values_and_names_are_plain(value: object) -> None:
    assert encode(value).plain


@pytest.mark.parametrize(
    "value",
    [
        Box(1),
        Color.RED,
        Box(1).get,
        Box.of,
        Pair(torch.ones(1), 2),
        nn.Linear(1, 1),
        ValueError("x"),
        collections.OrderedDict(a=Box(1)),
        functools.partial(double, Box(1)),
        np.array([Box(1)], dtype=object),
        torch.ones(1).as_subclass(Labelled),
        lambda: 0,
    ],
    ids=label,
)
def test_whatever_runs_code_on_arrival_is_not_plain(value: object) -> None:
    assert not encode(value).plain


def test_decoding_on_a_system_thread_never_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = encode((double, (1,), {}))
    assert decode_loaded(encoded.payload, (), ())[0] is double
    monkeypatch.delitem(sys.modules, __name__)
    with pytest.raises(ImportNeeded, match="test_codec"):
        decode_loaded(encoded.payload, (), ())


def test_decoding_on_a_system_thread_does_not_wait_for_a_module_being_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("half_imported")
    exec("def early(): pass\ndef late(): pass", vars(module))
    monkeypatch.setitem(sys.modules, "half_imported", module)
    early, late = (encode(vars(module)[name]).payload for name in ("early", "late"))
    module.__spec__ = types.SimpleNamespace(_initializing=True)  # type: ignore[assignment]
    del vars(module)["late"]
    assert decode_loaded(early, (), ()) is vars(module)["early"]
    with pytest.raises(ImportNeeded):
        decode_loaded(late, (), ())


# Errors


def test_an_unsendable_value_names_its_type_and_the_reason() -> None:
    with pytest.raises(EncodeError, match=r"a value of type list cannot be sent.*_thread.lock"):
        encode([threading.Lock()])


def test_futures_are_refused() -> None:
    future: Any = torch.futures.Future()
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        encode((double, (future,), {}))
    with pytest.raises(RuntimeError, match=r"Can not pickle torch\.futures\.Future"):
        encode(lambda: future)


def test_errors_of_references_reach_the_caller_unchanged() -> None:
    error = RRefDeletedError("gone")
    for value in (RaisesOnPickling(error), (lambda: 0, RaisesOnPickling(error))):
        with pytest.raises(RRefDeletedError) as caught:
            encode(value)
        assert caught.value is error


def test_an_error_in_getstate_is_the_cause_of_the_refusal() -> None:
    with pytest.raises(EncodeError, match="no disk") as caught:
        encode(RaisesOnPickling(OSError("no disk")))
    assert isinstance(caught.value.__cause__, OSError)


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def test_an_error_without_a_text_is_the_cause_of_the_refusal_too() -> None:
    with pytest.raises(EncodeError, match="Speechless whose text raises ValueError") as caught:
        encode(RaisesOnPickling(Speechless()))
    assert isinstance(caught.value.__cause__, Speechless)


def test_too_deep_nesting_is_refused_in_time() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(EncodeError):
        encode(deep)
    while deep:
        deep = deep.pop()


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        ((1, threading.Lock()), {}, "argument 1 (_thread.lock) of double cannot be sent"),
        ((1,), {"key": threading.Lock()}, "argument 'key' (_thread.lock) of double cannot be sent"),
        (([threading.Lock()],), {}, "argument 0 (list) of double cannot be sent"),
    ],
)
def test_the_offending_argument_is_named(
    args: tuple[Any, ...], kwargs: dict[str, Any], culprit: str
) -> None:
    text = codec.describe_unpicklable("double", double, args, kwargs, EncodeError("no"))
    assert text.startswith(culprit)
    assert text.endswith("cannot pickle '_thread.lock' object")


def test_an_offending_function_is_named() -> None:
    lock = threading.Lock()

    def guarded() -> bool:
        return lock.locked()

    name = guarded.__qualname__
    text = codec.describe_unpicklable(name, guarded, (), {}, EncodeError("no"))
    assert text.startswith("the function test_an_offending_function_is_named.<locals>.guarded")


def test_what_is_wrong_with_no_part_of_a_call_is_told_in_its_own_words() -> None:
    error = EncodeError("tensors of torch.int4 cannot be sent")
    text = codec.describe_unpicklable("double", double, (1,), {}, error)
    assert text == "a call of double cannot be sent: tensors of torch.int4 cannot be sent"


@pytest.mark.parametrize(
    "payload",
    [
        *(b"a", b"\x80\x05", b"garbage", b"t", b"m", b"m\0", b"m\1", b"m\1\3", b"m\1\x63"),
        *(encode([1] * 50).payload[:-9], b"a" + pickle.dumps(len), b"nn"),
        *(b"m\1\0.", b"m\1\5\2\0\0\0.", b"m\1\5\1\0\0\0\xff", b"m\1\7" + bytes(7)),
    ],
)
def test_damaged_payloads_raise_decode_errors(payload: bytes) -> None:
    with pytest.raises(DecodeError):
        decode(payload, (), ())


def test_an_index_beyond_the_tables_raises_a_decode_error() -> None:
    for value in (torch.ones(1), Handle()):
        with pytest.raises(DecodeError):
            decode(encode(value).payload, (), ())


def test_an_error_in_setstate_is_the_cause_of_the_decode_error() -> None:
    with pytest.raises(DecodeError, match="broken") as caught:
        round_trip(RaisesOnArrival(KeyError("broken")))
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(DecodeError, match="Speechless whose text raises ValueError"):
        round_trip(RaisesOnArrival(Speechless()))


def test_payloads_mean_nothing_to_plain_pickle() -> None:
    with pytest.raises(pickle.UnpicklingError, match=r"outside rpc\.wire\.codec\.decode"):
        pickle.loads(encode([torch.ones(1)]).payload)


@pytest.mark.parametrize("func", [double, operator.add, json.dumps])
def test_importable_functions_have_a_name_by_which_they_are_found(func: Any) -> None:
    name = codec.name_of(func)
    assert name is not None
    assert codec.find(name) is func


@pytest.mark.parametrize("func", [lambda: 1, "abc".upper, functools.partial(double, 1), Handle])
def test_what_is_not_a_plain_importable_function_has_no_name(func: Any) -> None:
    assert codec.name_of(func) is None


def test_a_name_that_is_missing_here_says_what_to_do() -> None:
    with pytest.raises(DecodeError, match="RPC pickler does not serialize"):
        codec.find(b"json\0no_such_function")


def test_encoding_leaves_cloudpickle_itself_alone() -> None:
    encode(lambda: torch.ones(1))
    assert cloudpickle.loads(cloudpickle.dumps(lambda: torch.ones(1)))().item() == 1.0


def test_threads_do_not_share_tables() -> None:
    def check(number: int, failures: list[int]) -> None:
        for _ in range(200):
            if round_trip((torch.tensor(number), "x"))[0].item() != number:
                failures.append(number)

    failures: list[int] = []
    threads = [threading.Thread(target=check, args=(n, failures)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
