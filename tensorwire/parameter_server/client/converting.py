"""Puts server tables in the place of a model's embeddings.

TorchRec's ``EmbeddingBagCollection`` is known by its methods; TorchRec is not imported.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.collection import EmbeddingBagCollection, Feature
from tensorwire.parameter_server.client.embedding import Embedding, EmbeddingBag, Lookup
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.declarations.arguments import instance
from tensorwire.parameter_server.declarations.initialisers import Initialiser, Normal, Uniform
from tensorwire.parameter_server.declarations.rules import Rule
from tensorwire.parameter_server.opaque import Untyped

Only = Collection[str] | Callable[[str, nn.Module], bool] | None
"""Names of modules, or a predicate of name and module; None for all."""
Rules = Rule | Mapping[str, Rule] | Callable[[str], Rule]
"""The rule of all tables, or by the name of the table."""


@dataclass(frozen=True, slots=True)
class LocalTable:
    """A table of a local model.

    Args:
        name: that it has, or gets, at servers.
        weight: its rows.
        init: draws rows as the module's class does.
    """

    name: str
    weight: Tensor
    init: Initialiser


def convert(
    model: nn.Module,
    cluster: Cluster,
    optimizer: Rules,
    *,
    only: Only = None,
    copy: bool = False,
    init: Initialiser | None = None,
    **options: Untyped,
) -> nn.Module:
    """Puts server tables in the place of a model's embeddings, so that servers keep their rows.

    ``nn.Embedding`` becomes :class:`Embedding`, ``nn.EmbeddingBag`` :class:`EmbeddingBag`, and
    TorchRec's ``EmbeddingBagCollection`` :class:`EmbeddingBagCollection`. A table has the name of
    its module, such as ``"user.embedding"``; of a collection, that and the name that the
    collection gives it, such as ``"sparse.t_user"``. Modules that share a weight share a table.

    Args:
        model: changed in place.
        cluster: where the tables are.
        optimizer: how rows move: a rule for all, a dict by the name of the table, or a function
            of it.
        only: names of modules, or a predicate of name and module. Default all.
        copy: whether rows begin as the model's weights; all trainers must then have the same.
            Rows that servers have already stay. Default False: they begin as ``init`` says.
        init: of rows. Default as the module's class draws them.
        options: of :meth:`Cluster.table`, for all tables.

    Returns:
        The model; or what takes its place if it is an embedding itself.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: there is nothing to convert, ``only`` names what is not there, or a module has
            an option that servers do not have.

    Example::

        ps.convert(model, cluster, ps.RowwiseAdagrad(lr=0.05), copy=True)
        optimizer = ps.Optimizer(cluster, model, dense=torch.optim.Adam)
    """
    instance("convert", "model", model, nn.Module, "a module")
    instance("convert", "cluster", cluster, Cluster, "a cluster of ps.connect()")
    selected = chosen("convert", model, only)
    made: dict[int, Table] = {}
    for name, module in selected.items():
        for local in local_tables(name, module):
            if id(local.weight) not in made:
                rule = _rule_of(optimizer, local.name)
                table = cluster.table(
                    local.name, local.weight.shape[1], rule, init=init or local.init, **options
                )
                made[id(local.weight)] = table
                if copy:
                    table.fill(torch.arange(len(local.weight)), local.weight.detach())
    for name, module in selected.items():
        remote = _remote(name, module, made)
        if not name:
            return remote
        _put_in_place(model, module, remote)
    return model


# --- what there is


def chosen(where: str, model: nn.Module, only: Only) -> dict[str, nn.Module]:
    """The embeddings that are meant, by name.

    Args:
        where: the function that a user called, for errors.
        model: the model.
        only: see :func:`convert`.

    Raises:
        ValueError: there are none, or ``only`` names what is not there.
    """
    every: dict[str, nn.Module] = {}
    inside: list[str] = []
    for name, module in model.named_modules(remove_duplicate=True):
        is_inner = any(name.startswith(outer) for outer in inside)
        if not is_inner and _is_embedding(module):
            every[name] = module
            inside.append(f"{name}." if name else "")
    if only is None:
        meant = every
    elif callable(only):
        meant = {name: each for name, each in every.items() if only(name, each)}
    else:
        if isinstance(only, str):
            raise TypeError(f"{where}: only={only!r} is one name; give [{only!r}]")
        if unknown := [name for name in only if name not in every]:
            raise ValueError(f"{where}: only has {unknown[0]!r}, which is no embedding in it; "
                             f"there are {', '.join(map(repr, every))}")  # fmt: skip
        meant = {name: each for name, each in every.items() if name in set(only)}
    if not meant:
        raise ValueError(f"{where}: there is no nn.Embedding, nn.EmbeddingBag or torchrec "
                         "EmbeddingBagCollection to convert in the model")  # fmt: skip
    return meant


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) or _is_torchrecs(module)


def _is_torchrecs(module: nn.Module) -> bool:
    return not isinstance(module, Lookup) and callable(
        getattr(module, "embedding_bag_configs", None)
    )


def local_tables(name: str, module: Untyped) -> Iterator[LocalTable]:
    """The tables of an embedding of torch's, or of a collection of TorchRec's."""
    if not _is_torchrecs(module):
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(module, option):
                raise ValueError(f"convert: {name!r} has {option}={getattr(module, option)!r}, "
                                 "which tables on servers do not have")  # fmt: skip
        yield LocalTable(name or "embedding", module.weight, Normal(1.0, seed=_seed(name)))
        return
    for config in module.embedding_bag_configs():
        whole = _table_name(name, config)
        scale = math.sqrt(1 / config.num_embeddings)
        weight = module.embedding_bags[config.name].weight
        yield LocalTable(whole, weight, Uniform(scale, seed=_seed(whole)))


def _table_name(name: str, config: Untyped) -> str:
    return f"{name}.{config.name}" if name else str(config.name)


def _seed(name: str) -> int:
    return sum(place * each for place, each in enumerate(name.encode(), 1)) & 0xFFFF


def _rule_of(rules: Rules, name: str) -> Rule:
    if isinstance(rules, Mapping):
        if name not in rules:
            raise ValueError(f"convert: optimizer has no rule for table {name!r}; it has "
                             f"{', '.join(map(repr, rules))}")  # fmt: skip
        return rules[name]
    rule = rules(name) if callable(rules) else rules
    instance("convert", "optimizer", rule, Rule, "a rule such as ps.SGD(lr=0.1)")
    return rule


# --- what takes its place


def _remote(name: str, module: Untyped, tables: Mapping[int, Table]) -> nn.Module:
    if _is_torchrecs(module):
        return _collection(name, module, tables)
    table = tables[id(module.weight)]
    made: nn.Module
    if isinstance(module, nn.Embedding):
        made = Embedding(table, module.padding_idx)
    else:
        made = EmbeddingBag(table, module.mode, module.include_last_offset, module.padding_idx)
    if not module.weight.requires_grad:
        made.requires_grad_(False)
    made.train(module.training)
    return made


def _collection(name: str, module: Untyped, tables: Mapping[int, Table]) -> nn.Module:
    features: dict[str, Table | Feature] = {}
    weighted = bool(module.is_weighted())
    for config in module.embedding_bag_configs():
        table = tables[id(module.embedding_bags[config.name].weight)]
        mode = str(getattr(config.pooling, "value", config.pooling)).lower()
        for feature in config.feature_names:
            if feature in features:
                raise ValueError(
                    f"convert: feature {feature!r} of {name!r} is looked up in several tables; "
                    "give it a name of its own in each"
                )
            features[feature] = Feature(table, mode, weighted)
    return EmbeddingBagCollection(features)


def _put_in_place(model: nn.Module, module: nn.Module, remote: nn.Module) -> None:
    """Puts it wherever the module is, also under several names."""
    for parent in list(model.modules()):
        for key, child in list(parent.named_children()):
            if child is module:
                setattr(parent, key, remote)
