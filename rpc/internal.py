"""Names that programs took from ``torch.distributed.rpc.internal``: values as bytes and tensors.

Owns the pickler object by which a program can look at, or replace, how a call's
function and arguments are serialized (``rpc.api._use_rpc_pickler``), and the
names under which calls appear in profiles. How values become bytes is the codec's.
"""

from __future__ import annotations

import contextvars
import enum
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rpc.functions import async_execution, idempotent
from rpc.wire import codec
from rpc.wire.handles import OutOfBandHandle
from rpc.wire.remote_errors import refuse_as_torch_does

_leaving: contextvars.ContextVar[list[OutOfBandHandle] | None] = contextvars.ContextVar(
    "rpc_references_leaving", default=None
)
"""Takes the references of the call that is serialized, which travel beside its bytes."""
_arrived: contextvars.ContextVar[Sequence[OutOfBandHandle]] = contextvars.ContextVar(
    "rpc_references_arrived", default=()
)
"""The references of the call that is put together again."""


class RPCExecMode(enum.Enum):
    """The ways to call a function on another worker."""

    SYNC = "sync"
    ASYNC = "async"
    ASYNC_JIT = "async_jit"
    REMOTE = "remote"


class PythonUDF(NamedTuple):
    """A function and what it is to be called with."""

    func: Callable[..., Any]
    args: tuple[Any, ...] | None
    kwargs: dict[str, Any] | None


class RemoteException(NamedTuple):
    """The error that a handler raised, as text and type."""

    msg: str
    exception_type: type[BaseException]


class _InternalRPCPickler:
    """Takes values apart into bytes and tensors, and puts them together again.

    Subclass it and override both methods to serialize calls in a way of your own.
    """

    def serialize(self, obj: object) -> tuple[bytes, list[torch.Tensor]]:
        """Takes ``obj`` apart; may be called while another value is being serialized.

        Raises:
            EncodeError: it cannot be serialized, or it holds an ``RRef`` and is not the
                call that is made. The receiver of a reference has to be known: those travel
                in calls only.
            RRefError: it holds a reference that must not be used any more.
        """
        leaving = _leaving.get()
        outer = _leaving.set(None)
        try:
            encoded = codec.encode(obj)
        finally:
            _leaving.reset(outer)
        if leaving == []:
            leaving += encoded.references
        else:
            for reference in encoded.references:
                reference._serialize()
        return encoded.payload, encoded.tensors

    def deserialize(self, binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
        """Puts together what :meth:`serialize` took apart."""
        return codec.decode(binary_data, tensor_table, _arrived.get())


_internal_rpc_pickler = _InternalRPCPickler()


def serialize(obj: object) -> tuple[bytes, list[torch.Tensor]]:
    """Takes a value apart into bytes and tensors."""
    return _internal_rpc_pickler.serialize(obj)


def deserialize(binary_data: bytes, tensor_table: list[torch.Tensor]) -> Any:
    """Puts together what :func:`serialize` took apart."""
    return _internal_rpc_pickler.deserialize(binary_data, tensor_table)


def serialize_call(
    pickler: _InternalRPCPickler, call: PythonUDF
) -> tuple[bytes, list[torch.Tensor], list[OutOfBandHandle]]:
    """Serializes a call, at the caller, as a pickler of the program's own does it.

    Returns:
        What :func:`run_serialized` takes; the references in it travel as they are.
    """
    _require_pickler(pickler)
    references: list[OutOfBandHandle] = []
    outer = _leaving.set(references)
    try:
        written: object = pickler.serialize(call)
    finally:
        _leaving.reset(outer)
    return *_serialized_by(pickler, written), references


def _require_pickler(pickler: object) -> None:
    methods = (getattr(pickler, name, None) for name in ("serialize", "deserialize"))
    if isinstance(pickler, type) or not all(map(callable, methods)):
        raise TypeError(
            f"rpc_pickler={pickler!r} must be an object with the methods serialize and deserialize"
        )


def _serialized_by(pickler: object, written: object) -> tuple[bytes, list[torch.Tensor]]:
    """Passes on what a pickler's ``serialize`` returned, if it is what it must return."""
    if isinstance(written, tuple) and len(written) == 2:
        data, tensors = written
        if isinstance(data, bytes | bytearray) and isinstance(tensors, list | tuple):
            return bytes(data), [*tensors]
    raise TypeError(
        f"serialize() of the pickler {pickler!r} must return bytes and a list of tensors, but "
        f"returned {written!r}"
    )


@idempotent
def run_serialized(
    binary_data: bytes, tensor_table: list[torch.Tensor], references: Sequence[OutOfBandHandle] = ()
) -> Any:
    """Runs, at the callee, a call that a pickler of the program's own serialized.

    It bears the mark for ``retry=``; whether the function does, its caller looked.
    """
    outer = _arrived.set(references)
    try:
        call = deserialize(binary_data, tensor_table)
    finally:
        _arrived.reset(outer)
    try:
        return call.func(*(call.args or ()), **(call.kwargs or {}))
    except TypeError as error:
        refuse_as_torch_does(call.func, error)
        raise


@idempotent
@async_execution
def run_serialized_async(
    binary_data: bytes, tensor_table: list[torch.Tensor], references: Sequence[OutOfBandHandle] = ()
) -> torch.futures.Future[Any]:
    """Runs such a call of a function whose future's value is the result."""
    future: torch.futures.Future[Any] = run_serialized(binary_data, tensor_table, references)
    return future


def _build_rpc_profiling_key(
    exec_type: RPCExecMode, func_name: str, current_worker_name: str, dst_worker_name: str
) -> str:
    """The name under which a call appears in a profile."""
    return f"rpc_{exec_type.value}#{func_name}({current_worker_name} -> {dst_worker_name})"
