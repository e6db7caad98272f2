"""Takes tensors that are not plain strided ones apart, and puts them together again.

Sparse tensors become their strided parts, subclasses the tensor in them; the
codec then sends those out of band. Knows nothing of bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import Parameter

from rpc.errors import EncodeError

_NO_DISPATCH: Final = getattr(Tensor, "__torch_dispatch__", None)
_COMPRESSED_BY_ROW: Final = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED_BY_COLUMN: Final = (torch.sparse_csc, torch.sparse_bsc)


def build_coo(
    kind: type[Tensor],
    grad: bool,
    size: tuple[int, ...],
    coalesced: bool,
    indices: Tensor,
    values: Tensor,
) -> Tensor:
    """Puts a COO tensor, or a Parameter of that layout, together again."""

    def build(values: Tensor) -> Tensor:
        return torch.sparse_coo_tensor(
            indices, values, size, is_coalesced=coalesced, check_invariants=True
        )

    return _with_grad(values, kind, grad, build)


def build_compressed(
    kind: type[Tensor],
    grad: bool,
    size: tuple[int, ...],
    layout: torch.layout,
    compressed: Tensor,
    plain: Tensor,
    values: Tensor,
) -> Tensor:
    """Puts a CSR, CSC, BSR or BSC tensor, or a Parameter of that layout, together again."""

    def build(values: Tensor) -> Tensor:
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size, layout=layout, check_invariants=True
        )

    return _with_grad(values, kind, grad, build)


def build_jagged(
    values: Tensor,
    grad: bool,
    offsets: Tensor,
    lengths: Tensor | None,
    ragged: int,
    shortest: int | None,
    longest: int | None,
) -> Tensor:
    """Puts a jagged nested tensor together again, as a part of the graph of its values."""

    def build(values: Tensor) -> Tensor:
        return torch.nested.nested_tensor_from_jagged(
            values, offsets, lengths, ragged, shortest, longest
        )

    return _with_grad(values, Tensor, grad, build)


def build_subclass(tensor: Tensor, kind: type[Tensor]) -> Tensor:
    """Gives ``tensor`` back its class."""
    if tensor.grad_fn is not None:
        return tensor.as_subclass(kind)
    return Tensor._make_subclass(kind, tensor.detach(), tensor.requires_grad)


def _with_grad(
    values: Tensor, kind: type[Tensor], grad: bool, build: Callable[[Tensor], Tensor]
) -> Tensor:
    """Builds a leaf, unless ``values`` became part of a graph."""
    if values.grad_fn is None:
        tensor = build(values.detach())
        return Parameter(tensor, grad) if kind is Parameter else tensor.requires_grad_(grad)
    tensor = build(values)
    if kind is Parameter:
        tensor._is_param = True
    return tensor


def travels_whole(tensor: Tensor) -> bool:
    """True for a COO tensor that requires grad: nothing leads from all of its parts back to it."""
    return tensor.layout is torch.sparse_coo and tensor.requires_grad


def reduce_sparse(tensor: Tensor) -> Any:
    """Reduces a sparse tensor, of any layout, to strided ones that it is rebuilt from.

    Raises:
        EncodeError: its layout has no such parts.
    """
    layout, size = tensor.layout, tuple(tensor.shape)
    head = type(tensor), tensor.requires_grad, size
    if layout is torch.sparse_coo:
        return build_coo, (*head, tensor.is_coalesced(), tensor._indices(), tensor._values())
    if layout in _COMPRESSED_BY_ROW:
        parts = tensor.crow_indices(), tensor.col_indices(), tensor.values()
    elif layout in _COMPRESSED_BY_COLUMN:
        parts = tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    else:
        raise EncodeError(f"a tensor of layout {layout} cannot be sent; convert it to dense first")
    return build_compressed, (*head, layout, *parts)


def reduce_tensor_subclass(tensor: Any) -> Any:
    """Reduces a subclass's tensor to a tensor if the class only adds Python state."""
    kind: Any = type(tensor)
    if tensor.layout is torch.jagged and tensor.requires_grad:
        return _reduce_jagged(tensor)
    if (
        kind.__reduce_ex__ is not Tensor.__reduce_ex__
        or kind.__setstate__ is not Tensor.__setstate__
        or kind.__torch_dispatch__ is not _NO_DISPATCH
        or tensor.layout is not torch.strided
    ):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        plain = tensor.as_subclass(Tensor)
        state = torch._utils._get_obj_state(tensor)  # type: ignore[no-untyped-call]
    if not state:
        return build_subclass, (plain, kind)
    return build_subclass, (plain, kind), state, None, None, torch._utils._set_obj_state


def _reduce_jagged(tensor: Any) -> Any:
    """Reduces a jagged tensor; torch's way would split it below autograd, and lose its gradient."""
    lengths, ragged = tensor.lengths(), tensor._ragged_idx
    shortest, longest = tensor._maybe_min_seqlen, tensor._maybe_max_seqlen
    grad = tensor.requires_grad
    parts = tensor.values(), grad, tensor.offsets(), lengths, ragged, shortest, longest
    state = {n: v for n, v in vars(tensor).items() if n == "_is_param" or not n.startswith("_")}
    if not state:
        return build_jagged, parts
    return build_jagged, parts, state, None, None, torch._utils._set_obj_state


def loses_its_gradient(tensor: Tensor) -> bool:
    """True for a subclass whose tensor lies below autograd, which torch takes apart there."""
    kind: Any = type(tensor)
    return (
        tensor.grad_fn is not None
        and tensor.layout is torch.strided
        and kind.__reduce_ex__ is Tensor.__reduce_ex__
        and kind.__torch_dispatch__ is not _NO_DISPATCH
    )
