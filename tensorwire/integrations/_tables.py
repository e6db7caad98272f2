"""Tables in the model of a Trainer: their rows move by their own rules, at the servers.

A Trainer gives all parameters of its model to its optimizer, those that stand for rows among them.
They are taken out as soon as it has made the optimizer, before it loads a checkpoint into it. So
the state that checkpoints keep is that of the dense parameters, and fits whenever it is loaded.
"""

from __future__ import annotations

import logging
from typing import Any, Final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import nn
from transformers import Trainer, TrainingArguments

from tensorwire import parameter_server as ps

_logger: Final = logging.getLogger("tensorwire")
_LOOKUPS: Final = (
    ps.Embedding,
    ps.EmbeddingBag,
    ps.EmbeddingBagCollection,
    ps.EmbeddingCollection,
)


def leave_rows_out(trainer: Trainer) -> None:
    """Has a Trainer make its optimizer, and its scheduler, for the dense parameters alone."""
    create, schedule = trainer.create_optimizer, trainer.create_scheduler

    def create_without_rows(*args: Any, **options: Any) -> Any:
        made = create(*args, **options)
        local = _innermost(trainer.optimizer)
        if isinstance(local, torch.optim.Optimizer) and not isinstance(local, ps.Optimizer):
            _remove(local, _rows_of(trainer.model))
        return made

    def schedule_without_rows(num_training_steps: int, optimizer: Any = None) -> Any:
        if has_tables(trainer.model):
            optimizer = _innermost(trainer.optimizer if optimizer is None else optimizer)
            optimizer = optimizer.local if isinstance(optimizer, ps.Optimizer) else optimizer
        return schedule(num_training_steps, optimizer)

    vars(trainer)["create_optimizer"] = create_without_rows
    vars(trainer)["create_scheduler"] = schedule_without_rows


def has_tables(model: nn.Module | None) -> bool:
    """True if a module of the model looks rows up in a table."""
    return model is not None and any(isinstance(each, _LOOKUPS) for each in model.modules())


def require_fitting(
    args: TrainingArguments, optimizer: torch.optim.Optimizer, model: nn.Module | None
) -> None:
    """Refuses what a Trainer cannot do with the tables of its model.

    Raises:
        ValueError: several processes train one model, or rows are still in the optimizer.
    """
    if not has_tables(model):
        return
    if args.world_size > 1:
        raise ValueError(
            f"world_size={args.world_size}: the model has tables, and only rank 0 of "
            "DistributedDataParallel speaks to the servers; call stand_alone() and start each "
            "process as a Trainer of its own, with mode='async'"
        )
    rows = set() if isinstance(optimizer, ps.Optimizer) else _rows_of(model)
    if any(id(each) in rows for group in optimizer.param_groups for each in group["params"]):
        raise ValueError(
            "the model has tables: give the callback to the Trainer when it is made, "
            "Trainer(..., callbacks=[...]), so that its optimizer leaves their rows to the servers"
        )


def require_rows_of(
    checkpoint: str | None, step: int, cluster: ps.Cluster, model: nn.Module | None
) -> None:
    """Refuses to resume a checkpoint with rows that begin anew; logs which rows are used.

    Args:
        checkpoint: that training resumes; None for none.
        step: of the checkpoint.
        cluster: where the rows are.
        model: of the Trainer.

    Raises:
        ValueError: nothing has been pushed to the servers, so the checkpoint's rows are not there.
    """
    if checkpoint is None or not step or not has_tables(model):
        return
    pushes = cluster.step
    if not pushes:
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r}: the servers begin anew, and so would the rows "
            "of the model's tables; connect with ps.connect(..., restore=) and the folder of the "
            "servers' snapshot in that checkpoint"
        )
    if pushes != step:
        _logger.warning("training resumes %s, of step %d, and the rows of tables are those after "
                        "%d steps", checkpoint, step, pushes)  # fmt: skip


def say_what_best_is(
    model: nn.Module | None, checkpoint: str | None, snapshots: str | None
) -> None:
    """Says in the log that rows are not among what ``load_best_model_at_end`` has loaded."""
    if has_tables(model) and checkpoint is not None:
        where = "" if snapshots is None else f"; those of then are in {checkpoint}/{snapshots}"
        _logger.warning("the best model's dense parameters were loaded from %s, and the rows of "
                        "tables are those of the last step%s", checkpoint, where)  # fmt: skip


def _innermost(optimizer: Any) -> Any:
    """The optimizer inside of accelerate's wrappers."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _rows_of(model: nn.Module | None) -> set[int]:
    """The parameters that stand for rows, by identity."""
    modules = [] if model is None else model.modules()
    lookups = [each for each in modules if isinstance(each, _LOOKUPS)]
    return {id(parameter) for each in lookups for parameter in each.parameters()}


def _remove(optimizer: torch.optim.Optimizer, rows: set[int]) -> None:
    for group in optimizer.param_groups:
        kept = [n for n, each in enumerate(group["params"]) if id(each) not in rows]
        for key in group.keys() & {"params", "param_names"}:
            group[key] = [group[key][place] for place in kept]
