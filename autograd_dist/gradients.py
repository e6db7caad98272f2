"""Keeps a context's leaf gradients and adds them up.

Follows the rules of torch's AccumulateGrad: a stored gradient has memory of its
own and the strides of its tensor, dense gradients add in place, and sparse ones
stay sparse until a dense one joins them.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Iterable

import torch

from rpc.extend import leave_tensors, take_tensors


class LeafGradients:
    """Gradients of one context's leaves on one worker."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_leaf: dict[torch.Tensor, torch.Tensor] = {}

    def add_all(self, owned: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Adds gradients of leaves that this object may keep and change (see `own_all`)."""
        kept: list[torch.Tensor] = []
        with self._lock:
            for leaf, gradient in owned:
                existing = self._by_leaf.setdefault(leaf, gradient)
                if existing is not gradient:
                    take_tensors((existing,))
                    with torch.no_grad():
                        gradient = self._by_leaf[leaf] = _sum(existing, gradient)
                kept.append(gradient)
            leave_tensors(kept)

    def snapshot(self) -> dict[torch.Tensor, torch.Tensor]:
        """A new dict with the current gradients."""
        with self._lock:
            gradients = dict(self._by_leaf)
        take_tensors(gradients.values())
        return gradients

    def __len__(self) -> int:
        return len(self._by_leaf)


def _sum(existing: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    if existing.layout is torch.strided:
        return existing.add_(gradient)
    # torch adds a sparse tensor to a dense one, not the other way round.
    return gradient + existing


def own_all(
    leaves: Iterable[torch.Tensor], gradients: list[torch.Tensor | None]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs leaves with gradients whose memory nothing else uses.

    Copies where it cannot prove that a gradient is exclusive: one that passed
    through an addition belongs to several leaves at once, others are views of
    something bigger or are still referenced by a hook. Empties ``gradients`` as
    it goes, so that at most one gradient exists twice at a time.
    """
    usual = yardstick()
    owned = []
    for position, leaf in enumerate(leaves):
        gradient = gradients[position]
        if gradient is None or not leaf.requires_grad:  # maybe not any more
            continue
        # One reference more than an object that is only in a list: the name above.
        is_shared = sys.getrefcount(gradients[position]) > usual.listed + 1
        if is_shared or usual.uses_of(gradient) not in usual.exclusive:
            gradient = _copy_like(leaf, gradient)
        elif gradient.layout is torch.sparse_coo:
            gradient = _with_own_indices(gradient)
        elif leaf.layout is not torch.strided or gradient.stride() != leaf.stride():
            gradient = _copy_like(leaf, gradient)
        gradients[position] = None
        owned.append((leaf, gradient))
    return owned


class Yardstick:
    """Tells whether a tensor's memory is nobody else's, by counting references.

    How many references something exclusive shows differs between releases of
    torch and Python, so exclusive things are made for comparison.
    """

    def __init__(self) -> None:
        alone = [object()]
        self.listed = sys.getrefcount(alone[0])
        self._count_uses = getattr(torch._C, "_storage_Use_Count", None)
        with torch.inference_mode(False):  # in which there are views without a base
            plain = self.uses_of(torch.empty(1, device="cpu"))
            # A transposed weight gradient: its base is one use more, and must be nobody else's.
            view = self.uses_of(torch.empty(1, device="cpu").view(1, 1))
            sparse = self.uses_of(torch.ones(1, device="cpu").to_sparse())
        self.exclusive = {plain, view, sparse} - {None}

    def uses_of(self, tensor: torch.Tensor) -> tuple[int, ...] | None:
        """Counts the uses of the memory; of a COO tensor, of that of its values.

        Returns:
            One of ``exclusive`` if the memory is nobody else's.
        """
        if self._count_uses is None or type(tensor) is not torch.Tensor:
            return None
        if tensor._use_count() != 1:  # type: ignore[attr-defined]
            return None
        if tensor.layout is torch.sparse_coo:
            values = tensor._values()
            return self._count_uses(values.untyped_storage()._cdata), values.is_contiguous()
        if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        uses: int = self._count_uses(tensor.untyped_storage()._cdata)
        base = tensor._base
        if base is None:
            return (uses,)
        shows_all = base.numel() == tensor.numel()
        return uses, shows_all, base._use_count(), sys.getrefcount(base)  # type: ignore[attr-defined]


@functools.cache
def yardstick() -> Yardstick:
    """The one of this process."""
    return Yardstick()


def _with_own_indices(gradient: torch.Tensor) -> torch.Tensor:
    """Keeps the values; the indices are often a view of the input that was looked up."""
    return torch.sparse_coo_tensor(
        gradient._indices().clone(),
        gradient._values(),
        gradient.shape,
        is_coalesced=gradient.is_coalesced(),
        check_invariants=False,
    )


def _copy_like(leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        if gradient.layout is not torch.strided or leaf.layout is not torch.strided:
            return gradient.detach().clone()
        return torch.empty_like(leaf, dtype=gradient.dtype, requires_grad=False).copy_(gradient)
