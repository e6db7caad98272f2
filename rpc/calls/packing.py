"""Turns a value into a message and back: codec, references, extensions, tensors in order.

The one place that knows in which order they must run. Sending: encode the value,
let extensions see its tensors, pass on its references, lower its tensors. Receiving:
take in the references (even if the value turns out not to be decodable, so that
nothing leaks), raise the tensors, let extensions replace them, decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any, NamedTuple

import torch

from rpc.errors import DecodeError
from rpc.ids import new_tuple
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.rrefs.transfer import NOTHING_LENT, Adopted, Loan
from rpc.runtime import lost_gradients, streams
from rpc.transports.base import Unreceived
from rpc.wire import codec, tensor_table
from rpc.wire.messages import Extensions
from rpc.wire.simple_values import NOT_SIMPLE, Encoded, decode_simple

_NONE_INLINE = -1

Attach = Callable[[Sequence[torch.Tensor], type[torch.Tensor] | None], Extensions]
Lower = Callable[[Sequence[torch.Tensor], int], tuple[bytes, tuple[torch.Tensor, ...]]]
Replace = Callable[[list[torch.Tensor]], list[torch.Tensor]]


class Packed(NamedTuple):
    """The parts that travel beside the payload of a value."""

    extensions: Extensions
    loan: Loan
    tensor_table: bytes
    slots: tuple[torch.Tensor, ...]


NOTHING_BESIDE = Packed((), NOTHING_LENT, b"", ())


def pack(
    encoded: Encoded,
    to: int,
    references: ReferenceKeeper,
    host_moves: Set[tuple[int, bool]],
    attach: Attach | None,
    *,
    borrow: bool,
    lower: Lower = tensor_table.pack_tied_tensors,
) -> Packed:
    """Prepares what was encoded for worker ``to``.

    Args:
        encoded: from the codec.
        to: the receiver's id.
        references: pass on those in the value.
        host_moves: see ``transports.base.MapsDevices``.
        attach: runs the extensions over the value's tensors, told the type of one that was
            cut off from its graph; None when there are none.
        borrow: the sender keeps references alive until the reply comes, so that
            those owned by the receiver need no fork.
        lower: ``tensor_table.pack_tensors`` if the receiver takes each tensor for its own,
            whatever memory it shares here.

    Raises:
        EncodeError: a tensor cannot be sent.
        RRefError: the value holds a reference that must not be shared any more.
    """
    _, tensors, rrefs, _, severed = encoded
    extensions = attach(tensors, severed) if attach is not None else ()
    table: bytes = b""
    slots: tuple[torch.Tensor, ...] = ()
    if tensors:
        if len(tensors) == 1:  # tied to no other
            lower = tensor_table.pack_tensors
        is_moved = host_moves and (to, borrow) in host_moves
        table, slots = lower(tensors, _NONE_INLINE if is_moved else tensor_table.INLINE_LIMIT)
    loan = references.lending.lend(rrefs, to, borrow=borrow) if rrefs else NOTHING_LENT
    return new_tuple(Packed, (extensions, loan, table, slots))


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
            for index in raised.requiring_grad:
                if index not in raised.parameters and tensors[index].is_leaf:
                    lost_gradients.watch(tensors[index])
    elif replace is not None:
        replace([])
    simple = decode_simple(payload, tensors, adopted.handles)
    return decode(payload, tensors, adopted.handles) if simple is NOT_SIMPLE else simple
