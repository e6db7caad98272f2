"""The bytes distributed autograd puts on the wire. The only module that knows them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from autograd_dist.failure import Failure, LostWorker
from autograd_dist.passes import Ack, Gradients, PassId, Promise, Request, Settle, Survey
from autograd_dist.sequels import SEQUEL_BYTES
from rpc.errors import FrameError
from rpc.extend import new_tuple

EXTENSION_NAME: Final = "autograd_dist"

_CALL: Final = struct.Struct("<QQ?")
_HEAD: Final = struct.Struct("<BBQIQQ")
_FIELDS: Final = struct.Struct("<QQ")
_ACK: Final = struct.Struct("<BiII")
_RETURNED: Final = struct.Struct("<Q")
_LOST: Final = struct.Struct("<QII")
_POSITION: Final = "I"

_RETAIN_GRAPH, _HAS_SEQUEL = 1, 2
_BARE, _WITH_FAILURE, _WITH_GRADIENTS = range(3)
_RELEASE, _GRADIENTS, _SURVEY, _PROMISE, _SETTLE, _INQUIRY = range(6)


class CallMetadata(NamedTuple):
    """The metadata that a request or reply inside a context carries.

    Attributes:
        context_id: the context.
        message_id: the sender's number for the tensors; 0 without any.
        positions: which of the message's tensors require grad.
        grad_enabled: the grad mode of a request's caller, in which the handler runs.
    """

    context_id: int
    message_id: int
    positions: tuple[int, ...]
    grad_enabled: bool = True

    @classmethod
    def decode(cls, data: bytes, tensor_count: int) -> CallMetadata:
        """Reads metadata that came with ``tensor_count`` tensors.

        Raises:
            FrameError: it is malformed.
        """
        if len(data) < _CALL.size:
            raise FrameError(f"{len(data)} bytes are no autograd metadata")
        context_id, message_id, grad_enabled = _CALL.unpack_from(data)
        positions: tuple[int, ...] = ()
        if len(data) > _CALL.size:
            positions = _unpack_positions(data, _CALL.size)
        if positions and max(positions) >= tensor_count:
            raise FrameError(f"autograd metadata names more than {tensor_count} tensors")
        return new_tuple(cls, (context_id, message_id, positions, grad_enabled))

    @staticmethod
    def context_of(data: bytes) -> int:
        """Only the context id."""
        if len(data) < _CALL.size:
            raise FrameError(f"{len(data)} bytes are no autograd metadata")
        context_id: int = _CALL.unpack_from(data)[0]
        return context_id


def encode_call(
    context_id: int, message_id: int, positions: Sequence[int], grad_enabled: bool = True
) -> bytes:
    """The bytes of :class:`CallMetadata`."""
    call = _CALL.pack(context_id, message_id, grad_enabled)
    if not positions:
        return call
    return call + struct.pack(f"<{len(positions)}{_POSITION}", *positions)


@dataclass(frozen=True, slots=True)
class Release:
    """News that contexts are over; the receiver tells the workers it knows."""

    context_ids: tuple[int, ...]

    def encode(self) -> bytes:
        """The message as bytes."""
        return _pack_ids(_RELEASE, self.context_ids)


@dataclass(frozen=True, slots=True)
class Inquiry:
    """Contexts that the receiver created, to which the sender was led by a worker that is gone.

    Answered with a :class:`Release` of those that are over; of the others the sender is to be
    told when they are.
    """

    context_ids: tuple[int, ...]

    def encode(self) -> bytes:
        """The message as bytes."""
        return _pack_ids(_INQUIRY, self.context_ids)


class PassMessage(NamedTuple):
    """A request of a pass, without its gradients.

    Attributes:
        pass_id: the pass.
        oldest: the oldest pass of this root in this context that is not over.
        request: what is asked.
        retain_graph: whether graphs must survive the pass.
        present: for gradients, which of the message's tensors have one.
        sequel: of the pass, if it has one; see ``sequels``.
    """

    pass_id: PassId
    oldest: int
    request: Request
    retain_graph: bool = False
    present: tuple[bool, ...] = ()
    sequel: bytes = b""


def encode_request(
    pass_id: PassId,
    oldest: int,
    request: Request,
    retain_graph: bool = False,
    present: Sequence[bool] = (),
    sequel: bytes = b"",
) -> bytes:
    """The bytes of a :class:`PassMessage`."""
    if isinstance(request, Gradients):
        kind, first, second, rest = _GRADIENTS, request.message_id, 0, bytes(present)
    elif isinstance(request, Promise):
        kind, first, second = _PROMISE, request.round, request.message_id
        rest = _pack_positions(request.positions)
    else:
        kind = _SURVEY if isinstance(request, Survey) else _SETTLE
        first, second, rest = request.round, 0, b""
    flags = _RETAIN_GRAPH * retain_graph + _HAS_SEQUEL * bool(sequel)
    head = _HEAD.pack(kind, flags, *pass_id, oldest)
    return head + _FIELDS.pack(first, second) + sequel + rest


def decode_message(body: bytes) -> Release | Inquiry | PassMessage:
    """Reads a message between the autograd extensions of two workers.

    Raises:
        FrameError: it is malformed.
    """
    if len(body) < _HEAD.size:
        raise FrameError(f"{len(body)} bytes are no autograd message")
    kind, flags, context_id, root, number, oldest = _HEAD.unpack_from(body)
    if kind == _RELEASE:
        return Release(_context_ids(body, context_id))
    if kind == _INQUIRY:
        return Inquiry(_context_ids(body, context_id))
    if len(body) < _HEAD.size + _FIELDS.size:
        raise FrameError(f"an autograd message of kind {kind} ends after {len(body)} bytes")
    first, second = _FIELDS.unpack_from(body, _HEAD.size)
    end = _HEAD.size + _FIELDS.size
    sequel = b""
    if flags & _HAS_SEQUEL:
        sequel = body[end : end + SEQUEL_BYTES]
        end += SEQUEL_BYTES
        if len(body) < end:
            raise FrameError(f"the sequel of an autograd message ends after {len(body)} bytes")
    present: tuple[bool, ...] = ()
    request: Request
    if kind == _GRADIENTS:
        present, request = tuple(map(bool, body[end:])), new_tuple(Gradients, (first,))
    else:
        request = _request(kind, first, second, body, end)
    pass_id = new_tuple(PassId, (context_id, root, number))
    retain_graph = bool(flags & _RETAIN_GRAPH)
    return new_tuple(PassMessage, (pass_id, oldest, request, retain_graph, present, sequel))


def decode_release(body: bytes) -> Release:
    """Reads the answer to an inquiry.

    Raises:
        FrameError: it is malformed.
    """
    message = decode_message(body)
    if not isinstance(message, Release):
        raise FrameError(f"an inquiry was answered with {type(message).__name__}")
    return message


def _pack_ids(kind: int, context_ids: Sequence[int]) -> bytes:
    ids = struct.pack(f"<{len(context_ids)}Q", *context_ids)
    return _HEAD.pack(kind, 0, len(context_ids), 0, 0, 0) + ids


def _context_ids(body: bytes, count: int) -> tuple[int, ...]:
    size = len(body) - _HEAD.size
    if size != count * 8:
        raise FrameError(f"{size} bytes are no {count} ids of autograd contexts")
    return struct.unpack_from(f"<{count}Q", body, _HEAD.size)


def _request(kind: int, first: int, second: int, body: bytes, end: int) -> Request:
    if kind == _SURVEY:
        return Survey(first)
    if kind == _PROMISE:
        return Promise(first, second, _unpack_positions(body, end))
    if kind == _SETTLE:
        return Settle(first)
    raise FrameError(f"there is no autograd message of kind {kind}")


class AckMessage(NamedTuple):
    """An acknowledgement, without its gradients.

    Attributes:
        ack: what it says.
        message_id: whose gradients come along; meaningless without any.
        present: which of that message's tensors have one; None if none come along.
    """

    ack: Ack
    message_id: int = 0
    present: tuple[bool, ...] | None = None

    @classmethod
    def decode(cls, data: bytes) -> AckMessage:
        """Reads an acknowledgement.

        Raises:
            FrameError: it is malformed.
        """
        if len(data) < _ACK.size:
            raise FrameError(f"{len(data)} bytes are no acknowledgement of gradients")
        kind, stuck, resolved, stepped = _ACK.unpack_from(data)
        if kind == _WITH_FAILURE:
            return cls(Ack(stuck, resolved, _failure(data), stepped))
        if kind == _WITH_GRADIENTS:
            start = _ACK.size + _RETURNED.size
            if len(data) < start:
                raise FrameError(f"{len(data)} bytes are no acknowledgement with gradients")
            message_id = _RETURNED.unpack_from(data, _ACK.size)[0]
            ack = Ack(stuck, resolved, None, stepped)
            return cls(ack, message_id, tuple(map(bool, data[start:])))
        if kind != _BARE or len(data) > _ACK.size:
            raise FrameError(f"{len(data)} bytes are no acknowledgement of kind {kind}")
        return new_tuple(cls, (new_tuple(Ack, (stuck, resolved, None, stepped)), 0, None))


def encode_ack(ack: Ack, message_id: int = 0, present: Sequence[bool] | None = None) -> bytes:
    """The bytes of an :class:`AckMessage`. What cannot be encoded of an error's text is escaped."""
    stuck, resolved, failure, stepped = ack
    if present is not None:
        head = _ACK.pack(_WITH_GRADIENTS, stuck, resolved, stepped)
        return head + _RETURNED.pack(message_id) + bytes(present)
    if failure is None:
        return _ACK.pack(_BARE, stuck, resolved, stepped)
    lost = failure.lost or LostWorker("", 0, "")
    name, reason, text = map(_encoded, (lost.name, lost.reason, failure.text))
    head = _ACK.pack(_WITH_FAILURE, stuck, resolved, stepped)
    return head + _LOST.pack(lost.incarnation, len(name), len(reason)) + name + reason + text


def _failure(data: bytes) -> Failure:
    """The failure that an acknowledgement tells of beyond its numbers."""
    start = _ACK.size + _LOST.size
    if len(data) < start:
        raise FrameError(f"{len(data)} bytes are no acknowledgement with an error")
    incarnation, name_size, reason_size = _LOST.unpack_from(data, _ACK.size)
    reason_at, text_at = start + name_size, start + name_size + reason_size
    if len(data) < text_at:
        raise FrameError(f"the lost worker in an acknowledgement ends after {len(data)} bytes")
    name, reason = _decoded(data[start:reason_at]), _decoded(data[reason_at:text_at])
    lost = LostWorker(name, incarnation, reason) if name else None
    return Failure(_decoded(data[text_at:]), lost)


def _encoded(text: str) -> bytes:
    return text.encode(errors="backslashreplace")


def _decoded(data: bytes) -> str:
    return data.decode(errors="backslashreplace")


def gather(gradients: Sequence[torch.Tensor | None]) -> tuple[tuple[bool, ...], list[torch.Tensor]]:
    """Returns a message's gradients as they travel: which there are, and these."""
    present: list[bool] = []
    tensors: list[torch.Tensor] = []
    for gradient in gradients:
        present.append(gradient is not None)
        if gradient is not None:
            tensors.append(gradient)
    return tuple(present), tensors


def spread(present: Sequence[bool], tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Puts the gradients that travelled back at their places.

    Raises:
        FrameError: there are more or fewer than announced.
    """
    if sum(present) != len(tensors):
        raise FrameError(f"{len(tensors)} gradients came where {sum(present)} were announced")
    if len(tensors) == len(present):
        return list(tensors)
    waiting = iter(tensors)
    return [next(waiting) if is_present else None for is_present in present]


def _pack_positions(positions: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(positions)}{_POSITION}", *positions)


def _unpack_positions(data: bytes, start: int) -> tuple[int, ...]:
    count, odd = divmod(len(data) - start, struct.calcsize(_POSITION))
    if odd:
        raise FrameError("autograd metadata ends within a number")
    return struct.unpack_from(f"<{count}{_POSITION}", data, start)
