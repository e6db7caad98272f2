"""Exceptions come back as themselves, whatever their classes do, and never break the caller."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import pickle
import re
import subprocess
import sys
import threading
import traceback
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rpc.errors import (
    DecodeError,
    EncodeError,
    RemoteError,
    RpcError,
    RpcTimeoutError,
    UnknownWorkerError,
    WorkerLostError,
)
from rpc.runtime.text import class_name
from rpc.wire.codec import decode, encode
from rpc.wire.handles import OutOfBandHandle
from rpc.wire.remote_errors import RemoteTraceback, decode_error, encode_error, raisable, retell
from rpc.worker_info import WorkerInfo

W1 = WorkerInfo("w1", 1)
W2 = WorkerInfo("w2", 2)

needs_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups are newer")
needs_notes = pytest.mark.skipif(sys.version_info < (3, 11), reason="notes are newer")


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def travel(error: BaseException, worker: WorkerInfo = W1) -> Any:
    return decode_error(encode_error(raised(error), worker))


class Unusual(Exception):
    """Its constructor does not take what ends up in ``args``."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}")
        self.code = code
        self.hint = hint


class Shouting(Exception):
    def __str__(self) -> str:
        return f"{self.args[0]}!!!"


class ShowsItself(Exception):
    def __repr__(self) -> str:
        return "<shown in its own way>"


class Reduced(Exception):
    def __reduce__(self) -> Any:
        raise RuntimeError("this must not be asked")


class Slotted(Exception):
    __slots__ = ("__hidden", "detail")

    def __init__(self, detail: int) -> None:
        super().__init__("slotted")
        self.detail = detail
        self.__hidden = 2 * detail

    def hidden(self) -> int:
        return self.__hidden


class Guarded(Exception):
    def __init__(self) -> None:
        super().__init__("guarded")
        self.__dict__["level"] = 3

    @property
    def level(self) -> int:
        return int(self.__dict__["level"]) + 1

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError("frozen")


class NeverInitialised(UnicodeDecodeError):
    def __new__(cls, *args: object) -> NeverInitialised:
        return UnicodeDecodeError.__new__(cls)

    def __init__(self, *args: object) -> None:
        pass


class BreaksItsText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError

    __repr__ = __str__


class RefusesHeirs(Exception):
    def __init_subclass__(cls) -> None:
        raise TypeError("no subclasses, please")


class Interrupting(KeyboardInterrupt):
    pass


class Handle(OutOfBandHandle):
    pass


# Type and text


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        KeyError("key"),
        Exception("plain"),
        RuntimeError("run"),
        StopIteration(3),
        AssertionError(),
        ZeroDivisionError("zero"),
        Unusual(1, hint="h"),
        Shouting("hey"),
        Reduced("r"),
        Slotted(4),
        json.JSONDecodeError("bad", "doc", 1),
        subprocess.CalledProcessError(2, "ls"),
        re.error("bad pattern"),
        RecursionError("deep"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_exception_comes_back_as_its_own_type_and_a_runtime_error(error: Exception) -> None:
    arrived = travel(error)
    assert isinstance(arrived, type(error))
    assert isinstance(arrived, RuntimeError)
    assert type(arrived).__name__ == type(error).__name__
    assert type(arrived).__qualname__ == type(error).__qualname__
    assert type(arrived).__module__ == type(error).__module__
    assert arrived.args == error.args
    assert str(arrived).startswith(str(error))
    assert repr(arrived) == repr(error)


def test_the_text_names_the_worker_and_shows_the_exception_and_its_traceback() -> None:
    lines = str(travel(ValueError("boom"))).splitlines()
    assert lines[0] == "boom"
    start = lines.index("On WorkerInfo(id=1, name=w1):")
    assert lines[start + 1] == "ValueError('boom')"
    assert lines[start + 2] == "Traceback (most recent call last):"
    assert lines[-1] == "ValueError: boom"


def test_the_cause_is_the_remote_traceback() -> None:
    arrived = travel(ValueError("boom"))
    assert isinstance(arrived.__cause__, RemoteTraceback)
    assert "in raised\n    raise error\n" in str(arrived.__cause__)
    assert "RemoteTraceback" in "".join(traceback.format_exception(arrived))


def test_an_exception_without_text_comes_back_with_the_report_alone() -> None:
    assert str(travel(AssertionError())).startswith(
        "On WorkerInfo(id=1, name=w1):\nAssertionError()"
    )


def test_line_breaks_backslashes_and_other_alphabets_survive() -> None:
    text = "\nfirst line\n日本語 C:\\new\\table ü\n"
    arrived = travel(ValueError(text))
    assert arrived.args == (text,)
    for whole in (str(arrived), str(arrived.__cause__)):
        assert whole.count(text) >= 1
        assert "\\n" not in whole.replace("C:\\new", "")


def test_the_text_needs_no_unescaping() -> None:
    arrived = str(travel(ValueError("\nFirst line of error \n next line \n")))
    assert arrived == arrived.encode().decode("unicode_escape")


def test_a_repr_of_the_users_own_is_kept() -> None:
    assert "\n<shown in its own way>\n" in str(travel(ShowsItself("x")))


def test_a_custom_text_is_kept() -> None:
    assert str(travel(Shouting("hey"))).startswith("hey!!!\n")


# State


def test_attributes_come_back_without_running_the_constructor() -> None:
    arrived = travel(Unusual(7, hint="check the fuse"))
    assert (arrived.code, arrived.hint) == (7, "check the fuse")


@needs_notes
def test_notes_come_back() -> None:
    error: Any = ValueError("x")
    error.add_note("look here")
    arrived = travel(error)
    assert arrived.__notes__ == ["look here"]
    assert "look here" in str(arrived)


def test_slots_and_guarded_attributes_come_back() -> None:
    slotted = travel(Slotted(4))
    assert (slotted.detail, slotted.hidden()) == (4, 8)
    assert travel(Guarded()).level == 4


def test_builtin_exceptions_keep_what_their_users_look_at() -> None:
    missing = travel(FileNotFoundError(2, "No such file", "a.txt"))
    assert (missing.errno, missing.strerror, missing.filename) == (2, "No such file", "a.txt")
    assert str(missing).startswith("[Errno 2] No such file: 'a.txt'\n")
    text = travel(UnicodeDecodeError("ascii", b"\xff", 0, 1, "bad byte"))
    assert (text.encoding, text.object, text.reason) == ("ascii", b"\xff", "bad byte")
    assert travel(StopIteration(5)).value == 5
    assert travel(ImportError("x", name="mod", path="p")).name == "mod"
    assert travel(AttributeError("x", name="attr")).name == "attr"
    assert travel(SyntaxError("bad", ("f.py", 3, 1, "x="))).lineno == 3


def test_a_builtin_base_that_was_never_initialised_is_no_obstacle() -> None:
    arrived = travel(NeverInitialised())
    assert isinstance(arrived, NeverInitialised)


def test_tensors_come_back_whatever_their_size() -> None:
    leaf = torch.arange(10_000.0).requires_grad_()
    error: Any = ValueError("nan in", leaf)
    error.batch = torch.ones(2, 3).t()
    arrived = travel(error)
    assert torch.equal(arrived.args[1], leaf)
    assert arrived.args[1].requires_grad
    assert arrived.batch.stride() == (1, 3)


@pytest.mark.parametrize("unsendable", [threading.Lock(), Handle()], ids=["lock", "reference"])
def test_parts_that_cannot_be_sent_are_described_or_left_out(unsendable: object) -> None:
    error: Any = Unusual(7, hint="h")
    error.args = ("text", unsendable)
    error.resource = unsendable
    arrived = travel(error)
    assert isinstance(arrived, Unusual)
    assert arrived.args == ("text", repr(unsendable))
    assert arrived.hint == "h"
    assert not hasattr(arrived, "resource")


def test_parts_that_cannot_be_rebuilt_are_described_or_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("only_at_the_callee")
    exec("class Thing: pass", vars(module))
    monkeypatch.setitem(sys.modules, "only_at_the_callee", module)
    error: Any = ValueError("text", vars(module)["Thing"]())
    error.thing = vars(module)["Thing"]()
    data = encode_error(error, W1)
    monkeypatch.delitem(sys.modules, "only_at_the_callee")
    arrived: Any = decode_error(data)
    assert isinstance(arrived, ValueError)
    assert arrived.args[0] == "text"
    assert "not rebuilt" in arrived.args[1]
    assert not hasattr(arrived, "thing")


def test_an_exception_whose_text_cannot_be_had_still_comes_back() -> None:
    arrived = travel(BreaksItsText("x"))
    assert isinstance(arrived, BreaksItsText)
    assert "whose text raises ZeroDivisionError" in str(arrived)


class Silent(type):
    def __getattribute__(cls, name: str) -> Any:
        if name == "__module__":
            raise RuntimeError(f"{name} is secret")
        return super().__getattribute__(name)


class SecretError(Exception, metaclass=Silent):
    """Its class does not tell from where it is."""


def test_an_exception_whose_class_does_not_tell_its_name_still_comes_back() -> None:
    arrived = travel(SecretError("x"))
    assert isinstance(arrived, RemoteError)
    assert "SecretError('x')" in str(arrived)


class Exits:
    """Ends, as a value, whoever packs it, and as an error's text whoever prints it."""

    def __reduce__(self) -> Any:
        raise SystemExit("packed")

    def __repr__(self) -> str:
        raise asyncio.CancelledError("printed")


class ExitsAsText(Exception):
    def __str__(self) -> str:
        raise SystemExit("printed")


def test_what_would_end_the_worker_as_an_exception_is_packed_ends_nothing() -> None:
    error: Any = ValueError("text", Exits())
    error.part = Exits()
    arrived = travel(error)
    assert isinstance(arrived, ValueError)
    assert arrived.args[0] == "text"
    assert "whose text raises CancelledError" in arrived.args[1]
    assert not hasattr(arrived, "part")
    assert "whose text raises SystemExit" in str(travel(ExitsAsText("x")))


# Groups


@needs_groups
def test_groups_come_back_with_their_members() -> None:
    group = eval("ExceptionGroup")
    sent = group("several", [ValueError("a"), group("inner", [Unusual(1, hint="h")])])
    arrived = travel(sent)
    assert isinstance(arrived, group)
    assert str(arrived).startswith("several (2 sub-exceptions)\n")
    first, inner = arrived.exceptions
    assert type(first) is ValueError
    assert inner.exceptions[0].hint == "h"
    matched, rest = arrived.split(ValueError)
    assert len(matched.exceptions) == 1
    assert len(rest.exceptions) == 1


@needs_groups
def test_groups_of_base_exceptions_become_remote_errors() -> None:
    arrived = travel(eval("BaseExceptionGroup")("g", [KeyboardInterrupt()]))
    assert type(arrived).__name__ == "RemoteError"


# Types that do not come back as they are


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), Interrupting("x")])
def test_what_would_end_the_caller_becomes_a_remote_error(error: BaseException) -> None:
    arrived = travel(error)
    assert isinstance(arrived, RemoteError)
    assert not isinstance(arrived, (KeyboardInterrupt, SystemExit))
    assert type(error).__qualname__ in str(arrived)
    assert "On WorkerInfo(id=1, name=w1):" in str(arrived)


def test_what_would_end_the_caller_does_not_though_it_is_a_runtime_error_as_well() -> None:
    error = retell(SystemExit(3), "told")  # type: ignore[arg-type]
    assert isinstance(error, RuntimeError)
    assert isinstance(error, SystemExit)
    arrived = travel(error)
    assert isinstance(arrived, RemoteError)
    assert not isinstance(arrived, SystemExit)


@pytest.mark.parametrize("error", [KeyboardInterrupt("stop"), SystemExit(3), Interrupting("x")])
def test_what_would_end_who_raises_it_is_made_harmless_here_as_well(error: BaseException) -> None:
    told = raisable(error)
    assert isinstance(told, RemoteError)
    assert not isinstance(told, type(error))
    assert str(told) == f"{class_name(type(error))}: {error}"
    assert getattr(told, "code", None) == getattr(error, "code", None)
    assert str(travel(told)).startswith(f"{told}\n\nOn WorkerInfo(id=1, name=w1):")
    unharmed = ValueError("x")
    assert raisable(unharmed) is unharmed


def test_the_exit_code_of_a_remote_exit_can_be_read() -> None:
    assert travel(SystemExit(3)).code == 3


def test_a_type_missing_at_the_caller_becomes_a_remote_error_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = types.ModuleType("callee_only")
    exec("class Custom(Exception): pass", vars(module))
    monkeypatch.setitem(sys.modules, "callee_only", module)
    data = encode_error(raised(vars(module)["Custom"]("details")), W1)
    monkeypatch.delitem(sys.modules, "callee_only")
    arrived = decode_error(data)
    assert isinstance(arrived, RemoteError)
    text = str(arrived)
    assert text.startswith("Failed to create original exception type callee_only.Custom")
    assert "Original exception on remote side was Custom('details')" in text
    assert "On WorkerInfo(id=1, name=w1):" in text
    assert isinstance(arrived.__cause__, RemoteTraceback)


def test_a_type_that_refuses_subclasses_becomes_a_remote_error() -> None:
    arrived = travel(RefusesHeirs("x"))
    assert isinstance(arrived, RemoteError)
    assert "no subclasses, please" in str(arrived)


def test_a_local_type_travels_by_value() -> None:
    class Here(Exception):
        pass

    arrived = travel(Here("x"))
    assert isinstance(arrived, Here)


# Our own errors


@pytest.mark.parametrize(
    "error",
    [
        UnknownWorkerError("no w9"),
        RpcTimeoutError("late"),
        EncodeError("no"),
        RemoteError("far"),
        DecodeError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_our_own_errors_come_back_as_themselves(error: RpcError) -> None:
    arrived = travel(error)
    assert isinstance(arrived, type(error))
    assert str(arrived).startswith(str(error))


def test_a_lost_worker_is_described_to_the_caller_of_the_caller() -> None:
    arrived = travel(WorkerLostError("w3", 2, "killed"))
    assert isinstance(arrived, WorkerLostError)
    assert (arrived.name, arrived.incarnation, arrived.reason) == ("w3", 2, "killed")


# Several hops, copies


def two_hops() -> Any:
    return travel(travel(Unusual(7, hint="h"), W2), W1)


def test_after_several_hops_the_type_is_derived_once() -> None:
    assert type(two_hops()) is type(travel(Unusual(1, hint="x")))
    assert type(two_hops()).__mro__[1] is Unusual


def test_after_several_hops_text_and_attributes_are_still_there() -> None:
    arrived = two_hops()
    text = str(arrived)
    assert text.startswith("code 7\n")
    assert text.index("On WorkerInfo(id=2, name=w2):") < text.index("On WorkerInfo(id=1, name=w1):")
    assert text.count("Unusual('code 7')\nTraceback") == 1
    assert text.count("Traceback (most recent call last)") == 2
    assert arrived.hint == "h"


def test_a_remote_error_keeps_its_text_over_further_hops() -> None:
    arrived = travel(travel(SystemExit(3), W2), W1)
    assert isinstance(arrived, RemoteError)
    assert str(arrived).startswith("SystemExit: 3\n")
    assert "name=w2" in str(arrived)
    assert "name=w1" in str(arrived)


def by_codec(error: Exception) -> Any:
    encoded = encode(error)
    return decode(encoded.payload, encoded.tensors, ())


@pytest.mark.parametrize(
    "duplicate",
    [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy, by_codec],
    ids=["pickle", "copy", "deepcopy", "codec"],
)
@pytest.mark.parametrize("original", [Unusual(7, hint="h"), WorkerLostError("w3", 2, "killed")])
def test_rebuilt_exceptions_can_be_copied_and_pickled(
    original: Exception, duplicate: Callable[[Any], Any]
) -> None:
    arrived = travel(original)
    again = duplicate(arrived)
    assert type(again) is type(arrived)
    assert str(again) == str(arrived)
    assert again.args == arrived.args
    assert vars(again).keys() == vars(arrived).keys()


def test_user_code_may_raise_the_type_of_a_rebuilt_exception() -> None:
    kind = type(travel(ValueError("x")))
    assert str(kind("mine")) == "mine"
    again = pickle.loads(pickle.dumps(kind("mine")))
    assert isinstance(again, ValueError)
    assert str(again) == "mine"


def test_a_wrapped_remote_exception_shows_both_workers() -> None:
    inner = travel(ValueError("inner"), W2)
    outer = KeyError("outer")
    outer.__cause__ = inner
    text = str(travel(outer, W1))
    assert "name=w2" in text
    assert "name=w1" in text


# Robustness


@pytest.mark.parametrize("data", [b"", b"garbage", encode("text").payload, encode((1, 2)).payload])
def test_damaged_bytes_become_a_remote_error(data: bytes) -> None:
    arrived = decode_error(data)
    assert type(arrived) is RemoteError
    assert "damaged" in str(arrived)


def test_an_exception_that_fights_back_becomes_something_readable() -> None:
    class Hostile(Exception):
        @property
        def args(self) -> Any:  # type: ignore[override]
            raise ZeroDivisionError("no args for you")

    arrived = travel(Hostile("x"))
    assert isinstance(arrived, RuntimeError)
    assert "Hostile" in str(arrived)


def test_types_are_not_kept_alive_one_by_one() -> None:
    def come_and_go() -> weakref.ref[type]:
        kind = types.new_class("Passing", (Exception,))
        travel(kind("x"))
        return weakref.ref(kind)

    references = [come_and_go() for _ in range(600)]
    gc.collect()
    assert sum(reference() is not None for reference in references) <= 300


def test_a_retold_error_is_of_its_type_and_says_the_new_text_only() -> None:
    told = retell(Unusual(7, hint="h"), "it failed on w1")
    assert isinstance(told, Unusual)
    assert isinstance(told, RuntimeError)
    assert (str(told), told.code, told.hint) == ("it failed on w1", 7, "h")
    assert str(retell(travel(ValueError("x")), "again")) == "again"


def test_a_retold_error_travels_and_is_pickled_with_its_text() -> None:
    told = retell(travel(ValueError("x")), "it failed on w1")
    copied = pickle.loads(pickle.dumps(told))
    assert (type(copied).__name__, str(copied)) == ("ValueError", "it failed on w1")
    further = travel(told, W2)
    assert isinstance(further, ValueError)
    assert str(further).startswith("it failed on w1\n\nOn WorkerInfo(id=2, name=w2):")


def test_an_error_that_cannot_be_copied_is_retold_as_a_remote_error() -> None:
    told = retell(RefusesHeirs("x"), "it failed on w1")
    assert isinstance(told, RemoteError)
    assert str(told) == "it failed on w1"
