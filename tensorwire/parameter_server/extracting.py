"""Fills local models from snapshots, without any cluster."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.converting import (
    LocalTable,
    Only,
    chosen,
    local_tables,
)
from tensorwire.parameter_server.declarations.arguments import instance
from tensorwire.parameter_server.reading import read, read_dense


def extract(
    model: nn.Module, folder: str | os.PathLike[str], *, only: Only = None, name: str = "model"
) -> nn.Module:
    """Fills a local model, as it was before :func:`convert`, from a snapshot.

    Args:
        model: its embeddings and dense parameters are set. Rows that are not in the snapshot, as
            nobody has pushed them, stay as they are.
        folder: the snapshot's.
        only: as it was given to :func:`convert`.
        name: of the dense parameters in the cluster, as it was given to :class:`Optimizer`; they
            stay as they are if the snapshot has none.

    Returns:
        The model.

    Raises:
        KeyError: a table is not in the snapshot.
        ValueError: a table is wider than the module's, or has ids that the module has no row for;
            or the dense parameters are others.

    Example::

        local = ps.extract(make_model(), "checkpoints/1000")
    """
    instance("extract", "model", model, nn.Module, "a module")
    selected = chosen("extract", model, only)
    seen: set[int] = set()
    for path, module in selected.items():
        for local in local_tables(path, module):
            if id(local.weight) not in seen:
                _fill(local, *read(folder, local.name))
            seen.add(id(local.weight))
    dense = [each for each in model.parameters() if each.requires_grad and id(each) not in seen]
    values = read_dense(folder, name)
    if values is not None and dense:
        _set_dense(dense, values, name)
    return model


def _fill(local: LocalTable, ids: Tensor, rows: Tensor) -> None:
    weight = local.weight
    if not len(ids):
        return
    if rows.shape[1] != weight.shape[1]:
        raise ValueError(f"extract: table {local.name!r} has dim={rows.shape[1]} in the snapshot, "
                         f"but {weight.shape[1]} in the model")  # fmt: skip
    if int(ids[0]) < 0 or int(ids[-1]) >= len(weight):
        wrong = int(ids[0]) if int(ids[0]) < 0 else int(ids[-1])
        raise ValueError(
            f"extract: table {local.name!r} has id {wrong}, and the model's has {len(weight)} rows"
        )
    with torch.no_grad():
        weight[ids.to(weight.device)] = rows.to(weight)


def _set_dense(parameters: list[nn.Parameter], values: Tensor, name: str) -> None:
    sizes = [each.numel() for each in parameters]
    if sum(sizes) != values.numel():
        raise ValueError(
            f"extract: {name!r} has {values.numel()} numbers in the snapshot, but the model's "
            f"dense parameters have {sum(sizes)}"
        )
    with torch.no_grad():
        for parameter, own in zip(parameters, values.split_with_sizes(sizes), strict=True):
            parameter.copy_(own.view_as(parameter))
