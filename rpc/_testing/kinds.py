"""The types of messages, as ``torch.distributed.rpc`` names them, and which type a frame is.

``PYTHON_CALL``, ``PYTHON_REMOTE_CALL`` and ``PYTHON_RREF_FETCH_CALL`` are calls,
creations and fetches of Python functions' results; ``SCRIPT_...`` the same for
torch's operators and for TorchScript functions. ``RREF_FORK_REQUEST``,
``RREF_CHILD_ACCEPT`` and ``RREF_USER_DELETE`` are what references need,
``CLEANUP_AUTOGRAD_CONTEXT_REQ`` and ``BACKWARD_AUTOGRAD_REQ`` what distributed
autograd needs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch

from rpc.extensions import AUTOGRAD
from rpc.ids import GlobalId
from rpc.transports.base import Frame, FrameKind
from rpc.wire import codec
from rpc.wire.control import Accepted, Delete, Register, decode_batch, decode_passed
from rpc.wire.messages import Operation, Request

_CALLS: Final = {
    Operation.CALL: "CALL",
    Operation.METHOD: "CALL",
    Operation.CREATE: "REMOTE_CALL",
    Operation.FETCH: "RREF_FETCH_CALL",
}
_NOTICES: Final = {
    Register: "RREF_FORK_REQUEST",
    Accepted: "RREF_CHILD_ACCEPT",
    Delete: "RREF_USER_DELETE",
}
_CLEANUP: Final = "CLEANUP_AUTOGRAD_CONTEXT_REQ"
_BACKWARD: Final = "BACKWARD_AUTOGRAD_REQ"

REPEATED: Final = frozenset({*_NOTICES.values(), _CLEANUP})
"""Messages that are sent again when sending fails."""

KINDS: Final = frozenset(
    {*REPEATED, _BACKWARD}
    | {f"{language}_{call}" for language in ("PYTHON", "SCRIPT") for call in _CALLS.values()}
)
"""All types."""

_script_call: ContextVar[bool] = ContextVar("rpc_testing_script_call", default=False)


class Callables:
    """Knows which calls are for TorchScript or torch's operators, which no frame tells."""

    def __init__(self) -> None:
        self._scripted: set[GlobalId] = set()

    @contextmanager
    def calling(self, func: object) -> Iterator[None]:
        """Marks what is sent in the block as belonging to a call of ``func``."""
        token = _script_call.set(_is_script(func))
        try:
            yield
        finally:
            _script_call.reset(token)

    def kinds(self, frame: Frame) -> set[str]:
        """The types of the messages in a frame that this worker is sending."""
        if frame.kind is FrameKind.NOTICE:
            if frame.header:  # of a channel
                return set()
            _, messages = decode_batch(frame.payload)
            return {_NOTICES[type(each)] for each in messages if type(each) in _NOTICES}
        if frame.kind is FrameKind.REQUEST:
            return self._request_kinds(Request.decode(frame.header), frame)
        return set()

    def _request_kinds(self, request: Request, frame: Frame) -> set[str]:
        if request.operation is Operation.EXTENSION:
            return _extension_kinds(request, frame)
        script = _script_call.get()
        if request.operation is Operation.CREATE and script:
            self._scripted.update(each.reference.rref for each in decode_passed(request.target))
        elif request.operation is Operation.FETCH:
            fetched = {each.reference.rref for each in decode_passed(request.target)}
            script = not fetched.isdisjoint(self._scripted)
        return {f"{'SCRIPT' if script else 'PYTHON'}_{_CALLS[request.operation]}"}


def _is_script(func: object) -> bool:
    if isinstance(func, torch.jit.ScriptFunction):
        return True
    return torch.jit._builtins._find_builtin(func) is not None  # type: ignore[no-untyped-call]


def _extension_kinds(request: Request, frame: Frame) -> set[str]:
    if request.target != AUTOGRAD.encode():
        return set()
    if request.tensor_table:
        return {_BACKWARD}
    wire = sys.modules[f"{AUTOGRAD}.wire"]
    (body,) = codec.decode(frame.payload, (), ())
    return {_CLEANUP if isinstance(wire.decode_message(body), wire.Release) else _BACKWARD}
