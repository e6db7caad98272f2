"""Turns user values into bytes, tensors and references, and back.

Decides what travels by reference (importable functions and classes), by value
(everything else, with cloudpickle) and out of band (tensors and RRef handles,
of which the bytes hold only an index). How tensors become bytes is the tensor
table's business, what a reference means on the wire is the reference keeper's.
There is no state between calls: picklers carry their tables with them. What needs no
pickler of ours is packed by ``simple_values``; nobody else pickles.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import fractions
import functools
import io
import operator
import pathlib
import pickle
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, Final

import cloudpickle
import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.errors import DecodeError, EncodeError, RpcError
from rpc.runtime.text import class_name, text_of
from rpc.wire import torch_objects
from rpc.wire.handles import OutOfBandHandle
from rpc.wire.simple_values import (
    NOT_SIMPLE,
    PROTOCOL,
    Encoded,
    decode_simple,
    encode_simple,
)
from rpc.wire.tensor_reductions import (
    loses_its_gradient,
    reduce_sparse,
    reduce_tensor_subclass,
    travels_whole,
)
from rpc.worker_info import WorkerInfo


class ImportNeeded(Exception):
    """Signal, not an error: decoding must import a module, which may run code and block."""


def encode(value: object) -> Encoded:
    """Takes ``value`` apart for sending.

    An object whose type defines ``__rpc_reduce__`` is reduced by that method,
    which returns what ``__reduce__`` would; for types that may be sent in calls
    but not pickled otherwise. Attributes set on tensors do not travel.

    Raises:
        EncodeError: the value, or something in it, cannot be serialized.
    """
    simple = encode_simple(value)
    return encode_any(value) if simple is None else simple


def name_of(func: Any) -> bytes | None:
    """The name by which any worker finds a function; None if it must be encoded."""
    kind = type(func)
    if kind is not FunctionType and kind is not BuiltinFunctionType:
        return None
    module, name = func.__module__ or "", func.__name__
    if getattr(sys.modules.get(module), name, None) is not func:
        return None
    if module == "__main__" and _main_is_interactive():
        return None
    return f"{module}\0{name}".encode()


def find(name: bytes) -> Any:
    """The function that :func:`name_of` named.

    Raises:
        DecodeError: there is none of that name on this worker.
    """
    module, _, attribute = name.decode("utf-8", "replace").partition("\0")
    found = getattr(sys.modules.get(module), attribute, None)
    return _Unpickler(io.BytesIO(b"")).find_class(module, attribute) if found is None else found


def encode_any(value: object) -> Encoded:
    """Encodes what ``simple_values`` does not pack; see :func:`encode`."""
    buffer = io.BytesIO()
    pickler = _PlainPickler(buffer, PROTOCOL)
    pickler.tensors = []
    pickler.references = []
    pickler.plain = True
    try:
        pickler.dump(value)
    except RpcError:
        raise
    except (_ByValue, pickle.PicklingError, TypeError, AttributeError):
        return _encode_by_value(value)
    except Exception as error:
        raise _encode_error(value, error) from error
    return Encoded(
        buffer.getvalue(), pickler.tensors, pickler.references, pickler.plain, pickler.severed
    )


def decode(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    references: Sequence[object],
) -> Any:
    """Rebuilds a value.

    Args:
        payload: from :func:`encode`.
        tensors: stand for ``Encoded.tensors``, in the same order.
        references: stand for ``Encoded.references``, in the same order.

    Raises:
        DecodeError: the bytes are damaged, or need something this worker lacks.
    """
    simple = decode_simple(payload, tensors, references)
    if simple is not NOT_SIMPLE:
        return simple
    return _load(_Unpickler(io.BytesIO(payload)), tensors, references)


def decode_loaded(
    payload: bytes | bytearray | memoryview,
    tensors: Sequence[Tensor],
    references: Sequence[object],
) -> Any:
    """Rebuilds a plain value on a thread that must not import anything.

    Raises:
        ImportNeeded: a module is not loaded yet; use :func:`decode` elsewhere.
        DecodeError: as :func:`decode`.
    """
    simple = decode_simple(payload, tensors, references)
    if simple is not NOT_SIMPLE:
        return simple
    return _load(_LoadedUnpickler(io.BytesIO(payload)), tensors, references)


def describe_unpicklable(
    name: str, func: object, args: Sequence[Any], kwargs: Mapping[str, Any], error: EncodeError
) -> str:
    """Says which part of a call makes it impossible to send, for the text of ``error``."""
    for what, value in _parts_of_call(name, func, args, kwargs):
        reason = _reason_not_to_send(value)
        if reason is not None:
            return f"{what} cannot be sent: {reason}"
    return f"a call of {name} cannot be sent: {error}"


def _parts_of_call(
    name: str, func: object, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, object]]:
    yield f"the function {name}", func
    for position, value in enumerate(args):
        yield f"argument {position} ({class_name(type(value))}) of {name}", value
    for key, value in kwargs.items():
        yield f"argument {key!r} ({class_name(type(value))}) of {name}", value


def _reason_not_to_send(value: object) -> str | None:
    try:
        encode(value)
    except Exception as error:
        return text_of(error.__cause__ or error)
    return None


# What a payload calls on arrival. The unpickler replaces the first three by
# its own bound methods; the names are only what the pickler writes down.


def take_tensor(index: int) -> Tensor:
    """Stands in payloads for a tensor of the table."""
    raise pickle.UnpicklingError(f"tensor {index} was met outside rpc.wire.codec.decode")


def take_reference(index: int) -> OutOfBandHandle:
    """Stands in payloads for a reference of the table."""
    raise pickle.UnpicklingError(f"reference {index} was met outside rpc.wire.codec.decode")


def take_global(module: str, name: str) -> Any:
    """Stands in payloads for an importable object that pickle would not look up by name."""
    raise pickle.UnpicklingError(f"{module}.{name} was met outside rpc.wire.codec.decode")


def mark_buffer(tensor: Tensor, persistent: bool) -> None:
    """Makes ``tensor`` an ``nn.Buffer``, which is a matter of two attributes."""
    tensor._is_buffer = True  # type: ignore[attr-defined]
    tensor.persistent = persistent  # type: ignore[attr-defined]


def load_script(data: bytes) -> Any:
    """Loads what ``torch.jit.save`` wrote."""
    return torch.jit.load(io.BytesIO(data))  # type: ignore[no-untyped-call]


def load_operator(name: str, overload: str | None) -> Any:
    """Finds ``torch.ops.<namespace>.<name>``, or one overload of it."""
    namespace, _, operator_name = name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), operator_name)
    return packet if overload is None else getattr(packet, overload)


class _ByValue(Exception):
    """The plain pickler met something that only cloudpickle can send."""


_SAFE_TYPES: Final[frozenset[type]] = frozenset(
    {
        *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
        *(complex, range, slice, bytearray, type(Ellipsis), type(NotImplemented)),
        *(collections.OrderedDict, collections.defaultdict, collections.deque),
        *(collections.Counter, functools.partial, decimal.Decimal, fractions.Fraction),
        *(datetime.date, datetime.time, datetime.datetime, datetime.timedelta),
        *(datetime.timezone, uuid.UUID, pathlib.PurePosixPath, pathlib.PosixPath),
        *(np.ndarray, np.bool_, np.int8, np.int16, np.int32, np.int64),
        *(np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64),
        *(np.complex64, np.complex128, np.dtype, *map(type, map(np.dtype, "?bhilqBHILQefdFD"))),
        WorkerInfo,
    }
)
"""Types whose instances are rebuilt without running user code."""

_SAFE_OWNERS: Final = (ModuleType, type(None))
_VARIABLE_FUNCTIONS: Final = getattr(torch.add, "__self__", None)
_MAIN_MODULES: Final = ("__main__", "__mp_main__")


class _Lifter:
    """Treats, for both picklers, what must not be pickled as it is."""

    tensors: list[Tensor]
    references: list[Any]
    plain: bool
    severed: type[Tensor] | None = None

    def lift(self, obj: Any, kind: type) -> Any:
        """Reduces ``obj``, an instance of ``kind``; NotImplemented if as usual."""
        if kind is Tensor or kind is Parameter:
            return self._lift_tensor(obj)
        return _treatment(kind)(self, obj)

    def _lift_tensor(self, tensor: Tensor) -> Any:
        if tensor.layout is not torch.strided and not travels_whole(tensor):
            return reduce_sparse(tensor)
        if tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            self.plain = False
            return NotImplemented
        tensors = self.tensors
        tensors.append(tensor)
        index = (len(tensors) - 1,)
        if getattr(tensor, "_is_buffer", False):
            persistent = getattr(tensor, "persistent", True)
            return take_tensor, index, persistent, None, None, mark_buffer
        return take_tensor, index


_Treatment = Callable[[_Lifter, Any], Any]


@functools.lru_cache(maxsize=1024)
def _treatment(kind: type) -> _Treatment:
    """The treatment of instances of ``kind``; pickle asks for each object it meets."""
    if kind in _SAFE_TYPES:
        return _leave_plain
    if issubclass(kind, OutOfBandHandle):
        return _lift_reference
    if issubclass(kind, Tensor):
        return _lift_subclass
    if kind is BuiltinFunctionType:
        return _leave_builtin_function
    if issubclass(kind, type):
        return _leave_class
    for special, reduce in _SPECIAL_REDUCTIONS:
        if issubclass(kind, special):
            return _running_code(reduce)
    if torch_objects.works_in_torchs_calls_only(kind):
        return _refuse_leftover
    return _running_code(getattr(kind, "__rpc_reduce__", None) or _leave)


def _leave(obj: object) -> Any:
    return NotImplemented


def _leave_plain(lifter: _Lifter, obj: object) -> Any:
    return NotImplemented


def _running_code(reduce: Callable[[Any], Any]) -> _Treatment:
    def treat(lifter: _Lifter, obj: Any) -> Any:
        lifter.plain = False
        return reduce(obj)

    return treat


def _lift_reference(lifter: _Lifter, obj: OutOfBandHandle) -> Any:
    lifter.references.append(obj)
    return take_reference, (len(lifter.references) - 1,)


def _lift_subclass(lifter: _Lifter, tensor: Tensor) -> Any:
    lifter.plain = False
    if loses_its_gradient(tensor):
        lifter.severed = type(tensor)
    return reduce_tensor_subclass(tensor)


def _leave_builtin_function(lifter: _Lifter, function: Any) -> Any:
    owner = function.__self__
    if owner is not _VARIABLE_FUNCTIONS and not isinstance(owner, _SAFE_OWNERS):
        lifter.plain = False
    return NotImplemented


def _leave_class(lifter: _Lifter, kind: type) -> Any:
    if kind.__module__ == "__main__" and _main_is_interactive():
        raise _ByValue
    return NotImplemented


def _refuse_leftover(lifter: _Lifter, obj: object) -> Any:
    raise EncodeError(
        f"a {class_name(type(obj))} means nothing to another worker"
        f"{torch_objects.import_remedy(obj)}"
    )


def _refuse_future(future: object) -> Any:
    raise EncodeError("Can not pickle torch.futures.Future; wait for it and send its value")


def _reduce_script_module(module: Any) -> Any:
    file = io.BytesIO()
    torch.jit.save(module, file)
    return load_script, (file.getvalue(),)


def _reduce_script_function(function: Any) -> Any:
    path = function.qualified_name.removeprefix("__torch__.")
    module, _, name = path.rpartition(".")
    module = module or "__main__"
    if getattr(sys.modules.get(module), name, None) is function:
        return take_global, (module, name)
    return load_script, (function.save_to_buffer(),)


def _reduce_operator(packet: Any) -> Any:
    return load_operator, (packet._qualified_op_name, None)


def _reduce_overload(overload: Any) -> Any:
    return load_operator, (overload.overloadpacket._qualified_op_name, overload._overloadname)


_SPECIAL_REDUCTIONS: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (torch._C.Future, _refuse_future),
    (torch.jit.ScriptModule, _reduce_script_module),
    (torch._C.ScriptFunction, _reduce_script_function),
    (torch._ops.OpOverloadPacket, _reduce_operator),
    (torch._ops.OpOverload, _reduce_overload),
)
"""Types that pickle does wrong or not at all."""


class _PlainPickler(_Lifter, pickle.Pickler):
    """C pickle; sees every function, class and instance that is not of a builtin type."""

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType or kind is type:
            if obj.__module__ == "__main__" and _main_is_interactive():
                raise _ByValue
            return NotImplemented
        return self.lift(obj, kind)


class _CloudPickler(_Lifter, cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, except that what a script file defines still goes by reference.

    Handlers of a script use its globals, so a copy of them would be wrong at a
    worker that runs the same script.
    """

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is FunctionType or issubclass(kind, type):
            if _is_global_of_script(obj):
                return NotImplemented
            return super().reducer_override(obj)
        return self.lift(obj, kind)


def _encode_by_value(value: object) -> Encoded:
    buffer = io.BytesIO()
    pickler = _CloudPickler(buffer, PROTOCOL)
    pickler.tensors = []
    pickler.references = []
    try:
        pickler.dump(value)
    except RpcError:
        raise
    except Exception as error:
        raise _encode_error(value, error) from error
    return Encoded(buffer.getvalue(), pickler.tensors, pickler.references, False, pickler.severed)


def _encode_error(value: object, error: Exception) -> EncodeError:
    kind = class_name(type(value))
    return EncodeError(f"a value of type {kind} cannot be sent: {text_of(error)}")


def _main_is_interactive() -> bool:
    """True for a REPL, a notebook, ``python -c`` and the like: peers lack its definitions."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    return file is None or file == "<stdin>"


def _is_global_of_script(obj: Any) -> bool:
    module = getattr(obj, "__module__", None)
    if module not in _MAIN_MODULES or _main_is_interactive():
        return False
    try:
        found = operator.attrgetter(obj.__qualname__)(sys.modules[module])
    except (KeyError, AttributeError):
        return False
    return found is obj


def _load(unpickler: _Unpickler, tensors: Sequence[Tensor], references: Sequence[object]) -> Any:
    unpickler.tensors = tensors
    unpickler.references = references
    try:
        return unpickler.load()
    except (RpcError, ImportNeeded):
        raise
    except Exception as error:
        raise DecodeError(
            f"a value that arrived cannot be rebuilt here: {type(error).__name__}: {text_of(error)}"
        ) from error


class _Unpickler(pickle.Unpickler):
    """Looks names up here, and tensors and references in its own tables."""

    tensors: Sequence[Tensor]
    references: Sequence[object]

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__:
            if name == "take_tensor":
                return self.tensors.__getitem__
            if name == "take_reference":
                return self.references.__getitem__
            if name == "take_global":
                return self.find_class
        loaded = sys.modules.get(module)
        if loaded is not None:
            attribute = getattr(loaded, name, None)
            if attribute is not None:
                return attribute
        if module == "__mp_main__" and loaded is None:
            # The sender was spawned by multiprocessing; here the same script runs directly.
            return self.find_class("__main__", name)
        return self.find_slowly(module, name)

    def find_slowly(self, module: str, name: str) -> Any:
        """Imports, and follows dots in ``name``."""
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError) as error:
            raise DecodeError(
                f"RPC pickler does not serialize function code: {name!r} of module {module!r} "
                f"does not exist on this worker ({error}). Define it in a module that both "
                "sides can import, or send a lambda or a local function, which travel by value."
            ) from error


class _LoadedUnpickler(_Unpickler):
    """An unpickler that refuses to import."""

    def find_slowly(self, module: str, name: str) -> Any:
        loaded = sys.modules.get(module)
        spec = getattr(loaded, "__spec__", None)
        if loaded is None or getattr(spec, "_initializing", False):
            raise ImportNeeded(module)
        return super().find_slowly(module, name)
