"""The ids of several features of one batch: what a collection is given, in one form.

Ids come as a dict of tensors, or as anything with the interface of TorchRec's
``KeyedJaggedTensor``, which is not imported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tensorwire.parameter_server.opaque import Untyped


@dataclass(frozen=True, slots=True)
class FeatureIds:
    """The ids of one feature.

    Args:
        ids: ``(n,)``, int64, bag after bag.
        each: ids in every bag; None if bags have different numbers of ids.
        lengths: ids of each bag, ``(batch,)``, int64; None if :attr:`each` says it.
        batch: how many bags there are.
        weights: a factor for each id, ``(n,)``; None for none.
    """

    ids: Tensor
    each: int | None
    lengths: Tensor | None
    batch: int
    weights: Tensor | None = None

    def sizes(self) -> Tensor:
        """Ids of each bag, int64."""
        if self.lengths is not None:
            return self.lengths
        return torch.full((self.batch,), self.each or 0)


def given(
    where: str, names: Sequence[str], weighted: Sequence[bool], batch: Untyped
) -> list[Untyped]:
    """The tensors that a batch consists of, by which it is known again.

    Args:
        where: the collection, for errors.
        names: the features.
        weighted: for each, whether it has weights.
        batch: a dict by feature, or like a ``KeyedJaggedTensor``.

    Raises:
        KeyError: a feature is missing.
        TypeError: it is neither.
        ValueError: keys have batches of different sizes.
    """
    if isinstance(batch, Mapping):
        if missing := [name for name in names if name not in batch]:
            raise KeyError(f"{where}: no ids for feature {missing[0]!r}; the batch has "
                           f"{', '.join(map(repr, batch))}")  # fmt: skip
        return [batch[name] for name in names]
    if not _is_keyed_jagged(batch):
        raise TypeError(
            f"{where}: ids are a {type(batch).__name__}, neither a dict from features to tensors "
            "nor like torchrec's KeyedJaggedTensor"
        )
    varies = getattr(batch, "variable_stride_per_key", None)
    if callable(varies) and varies():
        raise ValueError(f"{where}: the {type(batch).__name__} has batches of different sizes for "
                         "its keys; all features of a batch need as many bags")  # fmt: skip
    weights = batch.weights_or_none() if any(weighted) else None
    return [tuple(batch.keys()), batch.values(), batch.lengths(), weights]


def _is_keyed_jagged(batch: Untyped) -> bool:
    return all(callable(getattr(batch, name, None)) for name in ("keys", "values", "lengths"))


def feature_ids(
    where: str, names: Sequence[str], weighted: Sequence[bool], batch: Untyped
) -> list[FeatureIds]:
    """The ids of each feature.

    Args:
        where: the collection, for errors.
        names: the features.
        weighted: for each, whether it has weights.
        batch: a dict by feature, or like a ``KeyedJaggedTensor``.

    Raises:
        KeyError: a feature is missing.
        TypeError: ids are no whole numbers, or weights are missing.
        ValueError: the shapes do not fit each other.
    """
    parts = given(where, names, weighted, batch)
    if isinstance(batch, Mapping):
        features = [
            _from_tensor(where, name, each, has_weights)
            for name, each, has_weights in zip(names, parts, weighted, strict=True)
        ]
    else:
        features = _from_keyed_jagged(where, names, weighted, parts)
    wrong = [
        name for name, each in zip(names, features, strict=True) if each.batch != features[0].batch
    ]
    if wrong:
        other = next(
            each.batch for name, each in zip(names, features, strict=True) if name in wrong
        )
        raise ValueError(
            f"{where}: feature {wrong[0]!r} has {other} bags, and {names[0]!r} has "
            f"{features[0].batch}; all features of a batch need as many"
        )
    return features


def _from_tensor(where: str, name: str, ids: Untyped, weighted: bool) -> FeatureIds:
    weights = None
    if weighted:
        if not isinstance(ids, tuple) or len(ids) != 2:
            raise TypeError(f"{where}: feature {name!r} is weighted; give (ids, weights), not "
                            f"{type(ids).__name__}")  # fmt: skip
        ids, weights = ids
    if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
        kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
        raise TypeError(f"{where}: feature {name!r}: ids must be an int64 tensor, not {kind}")
    if weights is not None:
        _require_factors(where, name, weights)
    if ids.is_nested:
        return _from_nested(where, name, ids, weights)
    if weights is not None and weights.shape != ids.shape:
        raise ValueError(
            f"{where}: feature {name!r}: weights have shape {tuple(weights.shape)}, and ids "
            f"{tuple(ids.shape)}"
        )
    if ids.dim() != 2:
        raise ValueError(
            f"{where}: feature {name!r}: ids have shape {tuple(ids.shape)}, not (batch, n); "
            "for one id an example give ids[:, None], for different numbers a nested tensor"
        )
    flat = None if weights is None else weights.reshape(-1)
    return FeatureIds(ids.reshape(-1).long(), ids.shape[1], None, ids.shape[0], flat)


def _require_factors(where: str, name: str, weights: object) -> None:
    if not isinstance(weights, Tensor) or weights.dtype != torch.float32:
        kind = weights.dtype if isinstance(weights, Tensor) else type(weights).__name__
        raise TypeError(f"{where}: feature {name!r}: weights must be a float32 tensor, not {kind}")


def packed(where: str, ids: Untyped) -> Untyped:
    """A nested tensor as one without gaps between its parts, which ``narrow`` leaves.

    Args:
        where: whose it is, for the error.
        ids: nested.

    Raises:
        ValueError: it has another layout than ``torch.jagged``.
    """
    if ids.layout != torch.jagged:
        raise ValueError(f"{where}: a nested tensor has the layout {ids.layout}; make it with "
                         "layout=torch.jagged")  # fmt: skip
    return ids if ids.lengths() is None else ids.contiguous()


def factors_of(where: str, weights: Untyped, offsets: Tensor) -> Tensor:
    """The weights of nested ids as one tensor.

    Args:
        where: whose they are, for the error.
        weights: nested, or one tensor already.
        offsets: of the ids.

    Raises:
        ValueError: a bag has another number of weights than ids.
    """
    flat: Tensor = weights
    if weights.is_nested:
        weights = packed(where, weights)
        if not torch.equal(weights.offsets(), offsets):
            raise ValueError(f"{where}: weights have other numbers of elements than the bags' ids")
        flat = weights.values()
    return flat


def _from_nested(where: str, name: str, ids: Untyped, weights: Untyped) -> FeatureIds:
    whose = f"{where}: feature {name!r}"
    ids = packed(whose, ids)
    values, offsets = ids.values().long(), ids.offsets()
    lengths = offsets.diff().cpu()
    if values.dim() != 1 or int(lengths.sum()) != len(values):
        raise ValueError(f"{whose}: bags have {int(lengths.sum())} ids together, and the nested "
                         f"tensor's values the shape {tuple(values.shape)}")  # fmt: skip
    if weights is not None:
        weights = factors_of(whose, weights, offsets)
    if weights is not None and weights.shape != values.shape:
        raise ValueError(f"{whose}: weights have shape {tuple(weights.shape)}, and ids "
                         f"{tuple(values.shape)}")  # fmt: skip
    return FeatureIds(values, None, lengths, len(lengths), weights)


def _from_keyed_jagged(
    where: str, names: Sequence[str], weighted: Sequence[bool], parts: Sequence[Untyped]
) -> list[FeatureIds]:
    keys, values, lengths, weights = parts
    if missing := [name for name in names if name not in keys]:
        raise KeyError(f"{where}: no ids for feature {missing[0]!r}; the batch has "
                       f"{', '.join(map(repr, keys))}")  # fmt: skip
    if values.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{where}: ids must be an int64 tensor, not {values.dtype}")
    if any(weighted) and weights is None:
        raise TypeError(f"{where}: features are weighted, and the batch has no weights")
    if weights is not None:
        _require_factors(where, names[weighted.index(True)], weights)
        if weights.shape != values.shape:
            raise ValueError(f"{where}: weights have shape {tuple(weights.shape)}, and ids "
                             f"{tuple(values.shape)}")  # fmt: skip
    if lengths.numel() % len(keys):
        raise ValueError(f"{where}: {lengths.numel()} lengths are not as many for each of the keys "
                         f"{', '.join(map(repr, keys))}")  # fmt: skip
    by_key = lengths.cpu().long().view(len(keys), -1)
    counts = by_key.sum(1).tolist()
    if sum(counts) != len(values) or bool((by_key < 0).any()):
        raise ValueError(f"{where}: lengths must be at least 0 and name all of {len(values)} ids; "
                         f"they name {sum(counts)}")  # fmt: skip
    place = {key: number for number, key in enumerate(keys)}
    ids = values.long().split_with_sizes(counts)
    factors = None if weights is None else weights.split_with_sizes(counts)
    batch = by_key.shape[1]
    even = _all_alike(by_key)
    features = []
    for name, has_weights in zip(names, weighted, strict=True):
        at = place[name]
        own = factors[at] if has_weights and factors is not None else None
        each = counts[at] // batch if even and batch else None
        features.append(
            FeatureIds(ids[at], each, None if each is not None else by_key[at], batch, own)
        )
    return features


def _all_alike(lengths: Tensor) -> bool:
    """True if every bag of each feature has as many ids."""
    return bool((lengths == lengths[:, :1]).all()) if lengths.numel() else False
