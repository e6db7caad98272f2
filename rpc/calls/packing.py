"""Turns a value into a message and back: codec, references, extensions, tensors in order.

The one place that knows in which order they must run. Sending: encode the value,
let extensions see its tensors, lend its references, lower its tensors. Receiving:
adopt the references (even if the value turns out not to be decodable, so that
nothing leaks), raise the tensors, let extensions replace them, decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from rpc.errors import DecodeError
from rpc.ids import new_tuple
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.rrefs.transfer import NOTHING_LENT, Adopted, Loan
from rpc.runtime import streams
from rpc.transports.base import Unreceived
from rpc.wire import codec, tensor_table
from rpc.wire.messages import Extensions

_NONE_INLINE = -1
_MANY = tensor_table.INLINE_LIMIT // 4
"""Elements of a tensor that is unlikely to travel inside a header."""

Attach = Callable[[Sequence[torch.Tensor], type[torch.Tensor] | None], Extensions]
Lower = Callable[[Sequence[torch.Tensor], int], tuple[bytes, tuple[torch.Tensor, ...]]]
Replace = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Packed(NamedTuple):
    """A value ready to travel."""

    payload: bytes
    plain: bool
    extensions: Extensions
    loan: Loan
    tensor_table: bytes
    slots: tuple[torch.Tensor, ...]


def pack(
    value: object,
    to: int,
    keeper: ReferenceKeeper,
    attach: Attach | None,
    *,
    borrow: bool,
    lower: Lower = tensor_table.pack_tied_tensors,
) -> Packed:
    """Prepares ``value`` for worker ``to``.

    Args:
        value: anything picklable.
        to: the receiver's id.
        keeper: lends the references in the value.
        attach: runs the extensions over the value's tensors, told the type of one that was
            cut off from its graph; None when there are none.
        borrow: the sender keeps references alive until the reply comes, so that
            those owned by the receiver need no fork.
        lower: ``tensor_table.pack_tensors`` if the receiver takes each tensor for its own,
            whatever memory it shares here.

    Raises:
        EncodeError: the value cannot be serialized.
        RRefError: it holds a reference that must not be shared any more.
    """
    payload, tensors, references, plain, severed = codec.encode(value)
    extensions = attach(tensors, severed) if attach is not None else ()
    table: bytes = b""
    slots: tuple[torch.Tensor, ...] = ()
    if tensors:
        moves = keeper.agent.host_moves
        limit = _NONE_INLINE if moves and (to, borrow) in moves else tensor_table.INLINE_LIMIT
        table, slots = lower(tensors, limit)
    loan = keeper.lend(references, to, borrow=borrow) if references else NOTHING_LENT
    return new_tuple(Packed, (payload, plain, extensions, loan, table, slots))


def takes_long(value: object) -> bool:
    """Whether ``value`` is a large tensor, or a tuple with one; a guess, but a quick one."""
    if type(value) is not tuple:
        return type(value) is torch.Tensor and value.numel() > _MANY
    for each in value:  # noqa: SIM110 - a generator would take longer than this does
        if type(each) is torch.Tensor and each.numel() > _MANY:
            return True
    return False


def unpack(
    payload: bytes | bytearray | memoryview,
    table: bytes,
    slots: tuple[torch.Tensor, ...],
    adopted: Adopted,
    replace: Replace | None,
    decode: Callable[..., Any] = codec.decode,
) -> Any:
    """Rebuilds a value.

    ``decode`` is the codec's, or its variant for threads that must not run user code.

    Raises:
        DecodeError: something it needs does not exist on this worker, or no memory was left.
        FrameError: the tensor table is malformed.
    """
    if type(payload) is Unreceived:
        raise DecodeError(payload.decode())
    tensors: list[torch.Tensor] = []
    if slots:
        streams.take_tensors(slots)
    if table:
        raised = tensor_table.unpack_tensors(table, slots)
        if replace is not None:
            raised.tensors[:] = replace(raised.tensors)
        tensors = raised.tensors
        if raised.requiring_grad or raised.parameters:
            tensors = raised.finish()
    elif replace is not None:
        replace([])
    return decode(payload, tensors, adopted.handles)
