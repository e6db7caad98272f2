"""Splits a model into stages: slices of ``nn.Sequential``, or what torch's tracer makes of others.

The stages keep the parameters' names in the whole model. A tracer fixes what depends on the
shapes of its example, so that is to be of a micro-batch's shape; slices take any shape.
"""

from __future__ import annotations

import copy
import operator
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from remote_module import RemoteModule
from tensorwire.pipeline.balance import Balance, costs_of, even_cuts
from tensorwire.pipeline.wiring import SourceName

_tracer = threading.Lock()
"""Guards torch's tracer, which is of the process and traces one model at a time."""


@dataclass(frozen=True, slots=True)
class Split:
    """A model in stages, each on its worker.

    Args:
        stages: in order.
        inputs: the sources of each stage's arguments, as for ``Pipeline``.
        tied: parameters that several stages have, as for ``Pipeline``.
    """

    stages: list[RemoteModule]
    inputs: Mapping[int, Sequence[SourceName]]
    tied: list[list[tuple[int, str]]]


def split_model(
    model: nn.Module,
    workers: Sequence[str],
    at: Sequence[str] | None,
    example: Any,
    balance: Balance,
) -> Split:
    """Splits a model and puts the stages on workers.

    Args:
        model: the whole; it stays as it is.
        workers: where each stage goes, as for ``RemoteModule``.
        at: the names of the modules with which later stages begin; None for even stages.
        example: arguments for the model, of the shape of a micro-batch; a tuple of several.
        balance: the measure by which stages are even if ``at`` is None.

    Raises:
        ValueError: there are more or fewer stages than workers, or a name is not there; or stages
            are to be even, but the model is no ``nn.Sequential``.
    """
    arguments = example if isinstance(example, tuple) else (example,)
    if at is None:
        at = _even(model, len(workers), arguments, balance)
    if len(at) != len(workers) - 1:
        raise ValueError(
            f"at={list(at)!r} makes {len(at) + 1} stages, but there are {len(workers)} workers"
        )
    known = dict(model.named_modules())
    if missing := [name for name in at if name not in known]:
        raise ValueError(f"at={list(at)!r}: the model has no module {missing[0]!r}")
    if isinstance(model, nn.Sequential) and all("." not in name for name in at):
        return _slice(model, workers, at)
    return _trace(model, workers, at, arguments)


def _even(model: nn.Module, stages: int, arguments: tuple[Any, ...], balance: Balance) -> list[str]:
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"at=None: only an nn.Sequential can be cut evenly, and the model is a "
            f"{type(model).__name__}; name the modules with which stages begin"
        )
    names = [name for name, _ in model.named_children()]
    if len(names) < stages:
        raise ValueError(f"{len(names)} layers cannot be cut into {stages} stages")
    return [names[cut] for cut in even_cuts(costs_of(model, arguments, balance), stages)]


def _slice(model: nn.Sequential, workers: Sequence[str], at: Sequence[str]) -> Split:
    slices: list[OrderedDict[str, nn.Module]] = [OrderedDict()]
    for name, child in model.named_children():
        if name in at:
            slices.append(OrderedDict())
        slices[-1][name] = child
    modules = [nn.Sequential(each) for each in slices]
    if len(modules) != len(workers) or not all(slices):
        raise ValueError(f"at={list(at)!r}: every stage needs a layer, and each name once")
    stages = [
        RemoteModule(worker, _as_it_is, (module,))
        for worker, module in zip(workers, modules, strict=True)
    ]
    return Split(stages, {}, _ties(modules))


def _trace(
    model: nn.Module, workers: Sequence[str], at: Sequence[str], arguments: tuple[Any, ...]
) -> Split:
    traced = _traced(copy.deepcopy(model), at, arguments)  # which changes what it traces
    modules = [traced.get_stage_module(stage) for stage in range(len(workers))]
    # Traced modules cannot be sent, so every worker traces for itself.
    stages = [
        RemoteModule(worker, _trace_stage, (model, tuple(at), arguments, stage))
        for stage, worker in enumerate(workers)
    ]
    return Split(stages, _inputs(traced.split_gm.graph), _ties(modules))


def _as_it_is(module: nn.Module) -> nn.Module:
    return module


def _trace_stage(
    model: nn.Module, at: tuple[str, ...], arguments: tuple[Any, ...], stage: int
) -> nn.Module:
    module: nn.Module = _traced(model, at, arguments).get_stage_module(stage)
    return module


def _traced(model: nn.Module, at: Sequence[str], arguments: tuple[Any, ...]) -> Any:
    from torch.distributed.pipelining import SplitPoint, pipeline

    with _tracer:
        return pipeline(model, arguments, split_spec=dict.fromkeys(at, SplitPoint.BEGINNING))


def _inputs(graph: Any) -> dict[int, list[SourceName]]:
    """The outputs and arguments that each stage takes, read from the graph that joins them."""
    meant: dict[Any, SourceName] = {}
    inputs: dict[int, list[SourceName]] = {}
    positional = 0
    for node in graph.nodes:
        match node.op:
            case "placeholder":
                meant[node] = str(positional)
                positional += 1
            case "call_module":
                stage = len(inputs)
                inputs[stage] = [meant[each] for each in node.args]
                meant[node] = stage
            case "call_function" if node.target is operator.getitem:
                producer, output = node.args
                meant[node] = (int(meant[producer]), output)  # type: ignore[arg-type]
    return inputs


def _ties(modules: Sequence[nn.Module]) -> list[list[tuple[int, str]]]:
    """Groups of parameters that are one tensor in the whole model."""
    places: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for stage, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            places[id(parameter)].append((stage, name))
    return [shared for shared in places.values() if len(shared) > 1]
