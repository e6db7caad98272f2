"""Exceptions of handlers as bytes, and back into exceptions the caller can catch.

Decides what of an exception travels (type, args, attributes, notes, text,
traceback), what becomes of parts that cannot, and what the caller gets: an
instance of a subclass of the exception's own type and ``RuntimeError``, named
like the original. Raising, printing and sending are the agent's. Nothing here
raises: an exception that cannot be rebuilt becomes a :class:`RemoteError`.
"""

from __future__ import annotations

import builtins
import functools
import traceback
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, cast

import torch

from rpc.errors import EncodeError, RemoteError
from rpc.runtime.text import class_name, repr_of, text_of
from rpc.wire import codec, tensor_table
from rpc.worker_info import WorkerInfo

_MISFIT: Final = "Overloaded torch operator invoked from Python failed to match any schema"

_REPORT: Final = "_remote_report"
_HEAP_TYPE_FLAG: Final = 1 << 9
_EVERY_SIZE: Final = 1 << 62

_GROUP: Final[type[BaseException] | tuple[()]] = getattr(builtins, "BaseExceptionGroup", ())

# State that builtin exceptions keep outside of ``args`` and ``__dict__``.
_BUILTIN_FIELDS: Final = (
    (OSError, ("filename", "filename2")),
    (ImportError, ("name", "path")),
    (NameError, ("name",)),
    (AttributeError, ("name",)),
    (SystemExit, ("code",)),
)

Frozen = tuple[bytes, bytes]
"""A value as bytes: the codec's payload and the table with all of its tensors."""


class RemoteTraceback(Exception):
    """Cause of an exception that came from another worker; its text is the traceback there."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}" if self.args else ""


@dataclass(frozen=True, slots=True)
class _Hop:
    """One worker that an exception passed on its way, the one that raised it first."""

    worker: str
    shown: str
    traceback: str

    def __str__(self) -> str:
        return "\n".join(filter(None, (f"On {self.worker}:", self.shown, self.traceback)))


@dataclass(frozen=True, slots=True)
class _Report:
    """All that a rebuilt exception knows of its past."""

    text: str
    shown: str
    hops: tuple[_Hop, ...]

    def __str__(self) -> str:
        return "\n\n".join(filter(None, (self.text, *map(str, self.hops))))


@dataclass(frozen=True, slots=True)
class _Parcel:
    """An exception taken apart so far that each part can fail on its own."""

    type_name: str
    type: Frozen | None
    is_exception: bool
    args: tuple[Frozen | str, ...]
    attributes: tuple[tuple[str, Frozen], ...]
    fields: tuple[tuple[str, Frozen], ...]
    members: tuple[_Parcel, ...]
    text: str
    shown: str
    retold: bool = False


def encode_error(error: BaseException, worker: WorkerInfo) -> bytes:
    """Packs ``error``, raised by a handler on ``worker``. Never raises."""
    try:
        report = _report_of(error)
        parcel = _pack(error, report)
        shown = parcel.shown if report is None else ""
        hop = _Hop(str(worker), shown, _format_traceback(error, report))
        return _to_bytes(parcel, (*(report.hops if report else ()), hop))
    except BaseException as failure:
        text = f"{class_name(type(error))}, and packing it failed: {repr_of(failure)}"
        parcel = _Parcel(class_name(type(error)), None, True, (), (), (), (), text, text)
        return _to_bytes(parcel, (_Hop(str(worker), text, ""),))


def decode_error(data: bytes | bytearray | memoryview) -> BaseException:
    """Rebuilds what :func:`encode_error` packed. Never raises.

    The result's text begins with the original's, followed by the worker, the
    exception's repr and traceback there; its ``__cause__`` has the traceback too.
    """
    try:
        parcel, hops = codec.decode(data, (), ())
        return _unpack(parcel, hops)
    except Exception as failure:
        return RemoteError(f"an exception came back damaged: {repr_of(failure)}")


def retell(error: Exception, text: str) -> Exception:
    """A copy of ``error`` that says ``text``, for what adds to an error from a call.

    It is caught by what catches the original, and travels as well. Never raises:
    of an error that cannot be copied, a :class:`RemoteError` is left.
    """
    kind: Any = _original_type(type(error))
    try:
        parcel = _pack(error, _report_of(error))
        copy = _instantiate(_remote_type(kind), parcel)
        _restore_attributes(copy, parcel)
    except Exception:
        return cast(Exception, _stand_in(text, _Report(text, _show(error), ())))
    return cast(Exception, _with_report(copy, _Report(text, parcel.shown, ())))


def raisable(error: BaseException) -> Exception:
    """The error, or what stands for one that would end who raises it. Never raises.

    As one from another worker, ``KeyboardInterrupt``, ``SystemExit`` and the like of
    a function that was called on this one become a :class:`RemoteError`.
    """
    if isinstance(error, Exception):
        return error
    try:
        told = _unpack(_pack(error, None), ())
    except BaseException:
        told = RemoteError(class_name(type(error)))
    return cast(Exception, told.with_traceback(error.__traceback__))


def refuse_as_torch_does(func: object, error: TypeError) -> None:
    """Raises what an operator of torch raised when its arguments did not fit, in known words.

    Other functions are none of its business.

    Raises:
        TypeError: ``func`` is such an operator.
    """
    if torch.jit._builtins._find_builtin(func) is not None:  # type: ignore[no-untyped-call]
        raise TypeError(f"{_MISFIT}: {error}") from error


def _to_bytes(parcel: _Parcel, hops: tuple[_Hop, ...]) -> bytes:
    return codec.encode((parcel, hops)).payload


# Taking apart


def _pack(error: BaseException, report: _Report | None) -> _Parcel:
    kind = _original_type(type(error))
    text = report.text if report else text_of(error)
    return _Parcel(
        type_name=class_name(kind),
        type=_freeze(kind),
        is_exception=issubclass(kind, Exception),
        args=tuple(_freeze(arg) or repr_of(arg) for arg in _args_of(error)),
        attributes=_freeze_items(_attributes_of(error)),
        fields=_freeze_items(_fields_of(error)),
        members=tuple(_pack(member, _report_of(member)) for member in _members_of(error)),
        text=text,
        shown=report.shown if report else _show(error),
        retold=report is not None and not report.hops,
    )


def _args_of(error: BaseException) -> tuple[object, ...]:
    # The second argument of a group is its members, which are packed themselves.
    return error.args[:1] if isinstance(error, _GROUP) else error.args


def _members_of(error: BaseException) -> tuple[BaseException, ...]:
    return tuple(getattr(error, "exceptions", ())) if isinstance(error, _GROUP) else ()


def _attributes_of(error: BaseException) -> list[tuple[str, object]]:
    return [*(item for item in error.__dict__.items() if item[0] != _REPORT), *slots_of(error)]


def slots_of(error: BaseException) -> list[tuple[str, object]]:
    """The attributes that an exception keeps outside of its ``__dict__``."""
    attributes = []
    for base in type(error).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else tuple(slots):
            member = _mangle(base, name)
            if member not in ("__dict__", "__weakref__") and hasattr(error, member):
                attributes.append((member, getattr(error, member)))
    return attributes


def _mangle(owner: type, name: str) -> str:
    if name.startswith("__") and not name.endswith("__"):
        return f"_{owner.__name__.lstrip('_')}{name}"
    return name


def _fields_of(error: BaseException) -> list[tuple[str, object]]:
    values = (
        (name, getattr(error, name, None))
        for base, names in _BUILTIN_FIELDS
        if isinstance(error, base)
        for name in names
    )
    return [item for item in values if item[1] is not None]


def _freeze_items(items: Iterable[tuple[str, object]]) -> tuple[tuple[str, Frozen], ...]:
    frozen = ((name, _freeze(value)) for name, value in items)
    return tuple((name, part) for name, part in frozen if part is not None)


def _freeze(value: object) -> Frozen | None:
    try:
        encoded = codec.encode(value)
        if encoded.references:
            raise EncodeError("an exception cannot carry references")
        tensors = [tensor.cpu() for tensor in encoded.tensors]
        table, slots = tensor_table.pack_tensors(tensors, inline_limit=_EVERY_SIZE)
        return None if slots else (encoded.payload, table)
    except BaseException:
        return None


def _format_traceback(error: BaseException, report: _Report | None) -> str:
    try:
        if report is None:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
        else:
            # Its text holds the tracebacks of earlier hops; this is the stack of the last.
            head = "Traceback (most recent call last):\n"
            lines = [head, *traceback.format_tb(error.__traceback__), report.shown]
        return "".join(lines).rstrip("\n")
    except BaseException as failure:
        return f"(formatting the traceback failed: {repr_of(failure)})"


def _show(error: BaseException) -> str:
    """The exception's repr; if the default one, with line breaks and the like as they are."""
    if type(error).__repr__ is not BaseException.__repr__:
        return repr_of(error)
    return f"{type(error).__name__}({', '.join(map(_show_argument, error.args))})"


def _show_argument(value: object) -> str:
    shown = repr_of(value)
    return f"'{value}'" if type(value) is str and "\\" in shown else shown


# Putting together


def _unpack(parcel: _Parcel, hops: tuple[_Hop, ...]) -> BaseException:
    report = _Report(parcel.text, parcel.shown, hops)
    if not parcel.is_exception:
        # KeyboardInterrupt, SystemExit and the like must not end the caller.
        error = _stand_in(f"{parcel.type_name}: {parcel.text}", report)
        _restore_attributes(error, parcel)
        return error
    try:
        if parcel.type is None:
            raise EncodeError("the type could not be sent")
        kind = _thaw(parcel.type)
        reports = hops or parcel.retold
        error = _instantiate(_remote_type(kind) if reports else kind, parcel)
        _restore_attributes(error, parcel)
        return _with_report(error, report) if reports else error
    except Exception as failure:
        reason = text_of(failure)
        return _stand_in(
            f"Failed to create original exception type {parcel.type_name}: {reason}. "
            f"Original exception on remote side was {parcel.shown}",
            report,
        )


def _stand_in(text: str, report: _Report) -> BaseException:
    error = _remote_type(RemoteError)(text)
    return _with_report(error, _Report(text, report.shown, report.hops))


def _with_report(error: BaseException, report: _Report) -> BaseException:
    error.__dict__[_REPORT] = report
    if report.hops:
        cause = RemoteTraceback("\n\n".join(map(str, report.hops)))
        BaseException.__setattr__(error, "__cause__", cause)
    return error


def _instantiate(kind: type[BaseException], parcel: _Parcel) -> BaseException:
    """An instance without running the user's ``__init__``, which may want other arguments."""
    native = _native_base(kind)
    args = tuple(_thaw_or_describe(part) for part in parcel.args)
    if parcel.members:
        args = (*args, [_unpack(member, ()) for member in parcel.members])
    try:
        error = native.__new__(kind, *args)
        native.__init__(error, *args)
    except TypeError:
        # For instance a UnicodeDecodeError whose subclass never passed the five arguments on.
        error = native.__new__(kind)
        BaseException.__setattr__(error, "args", args)
    return error


def _native_base(kind: type[BaseException]) -> type[BaseException]:
    """The type written in C that lays out the instances."""
    base: type = kind
    while base.__flags__ & _HEAP_TYPE_FLAG and base.__base__ is not None:
        base = base.__base__
    return base


def _restore_attributes(error: BaseException, parcel: _Parcel) -> None:
    for name, part in (*parcel.attributes, *parcel.fields):
        try:
            _set_attribute(error, name, _thaw(part))
        except Exception:
            # What cannot be rebuilt here is left out; the text still tells.
            continue


def _set_attribute(error: BaseException, name: str, value: object) -> None:
    """Sets what the original had, past any property or ``__setattr__`` of the class."""
    descriptor = next((vars(t)[name] for t in type(error).__mro__ if name in vars(t)), None)
    if isinstance(descriptor, types.MemberDescriptorType):
        descriptor.__set__(error, value)
    else:
        error.__dict__[name] = value


def _thaw(part: Frozen) -> Any:
    payload, table = part
    return codec.decode(payload, tensor_table.unpack_tensors(table, ()).finish(), ())


def _thaw_or_describe(part: Frozen | str) -> Any:
    if isinstance(part, str):
        return part
    try:
        return _thaw(part)
    except Exception as failure:
        return f"<not rebuilt: {text_of(failure)}>"


# The types of rebuilt exceptions


def _report_of(error: BaseException) -> _Report | None:
    report = error.__dict__.get(_REPORT)
    return report if isinstance(report, _Report) else None


def _original_type(kind: type[BaseException]) -> type[BaseException]:
    original: type[BaseException] = kind.__dict__.get("_remote_original", kind)
    return original


@functools.lru_cache(maxsize=256)
def _remote_type(kind: type[BaseException]) -> type[BaseException]:
    """A subclass of ``kind`` and RuntimeError that looks like ``kind``."""
    bases: tuple[type, ...] = (kind,) if issubclass(kind, RuntimeError) else (kind, RuntimeError)
    if issubclass(RuntimeError, kind):
        bases = (RuntimeError,)

    def __str__(self: BaseException) -> str:
        report = _report_of(self)
        return str(report) if report else str(kind.__str__(self))

    def __reduce_ex__(self: BaseException, protocol: object) -> tuple[Any, ...]:
        report = _report_of(self)
        return decode_error, (_to_bytes(_pack(self, report), report.hops if report else ()),)

    namespace = {
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__str__": __str__,
        "__reduce_ex__": __reduce_ex__,
        "_remote_original": kind,
    }
    return types.new_class(kind.__name__, bases, {}, lambda body: body.update(namespace))
