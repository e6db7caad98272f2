"""Compares what was saved with what is to take it over, before anything is loaded.

Equal parts are loaded bit for bit. A conversion changes values or drops state; it is made only
if the user wants that (``strict=False``), and is said in the log. Anything else is an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tensorwire.checkpoint.errors import DamagedCheckpointError

CLASS: Final = "$class"
"""Among the saved values of an optimizer, the name of that of its class."""
SHAPE: Final = "$shape/"
"""Begins the names of the shapes of its parameters."""


@dataclass(frozen=True, slots=True)
class Fit:
    """The differences between saved state and the state that takes it over.

    Args:
        taken: the names that are taken over.
        conversions: what is changed on the way.
        misfits: what makes it something else.
    """

    taken: frozenset[str] = frozenset()
    conversions: tuple[str, ...] = ()
    misfits: tuple[str, ...] = ()


def fit_of_tensors(mine: Mapping[str, Any], saved: Mapping[str, Any], prefix: str = "") -> Fit:
    """Compares the state of a module, by name, with what was saved of it.

    Args:
        mine: the state of the module that is to take it over.
        saved: what was saved.
        prefix: begins the module's names there.
    """
    conversions, misfits = [], []
    for name, value in mine.items():
        if prefix + name not in saved:
            misfits.append(f"has no {prefix + name!r}; it may be of another model")
            continue
        was = saved[prefix + name]
        if not isinstance(value, Tensor) or is_lazy(value):
            continue
        if not isinstance(was, Tensor):
            misfits.append(f"has a {type(was).__name__} for the tensor {prefix + name!r}")
        elif was.shape != value.shape:
            misfits.append(
                f"has {prefix + name!r} of shape {tuple(was.shape)}, not {tuple(value.shape)}"
            )
        elif was.dtype != value.dtype:
            conversions.append(f"{prefix + name!r} from {was.dtype} to {value.dtype}")
    return Fit(frozenset(prefix + name for name in mine), tuple(conversions), tuple(misfits))


def fit_of_module(module: nn.Module, saved: object) -> Fit:
    """Compares a module of this process with what its ``state_dict`` was.

    Modules whose hooks rename what they load are left to say themselves what does not fit.
    """
    if not isinstance(saved, Mapping):
        return Fit(misfits=(f"is a {type(saved).__name__}, no state of a module",))
    if any(each._load_state_dict_pre_hooks for each in module.modules()):
        return Fit(frozenset(saved))
    fit = fit_of_tensors(module.state_dict(), saved)
    return Fit(fit.taken, fit.conversions, (*fit.misfits, *left_over(saved, fit.taken)))


def left_over(saved: Iterable[str], taken: Iterable[str]) -> list[str]:
    """Says which saved names nothing takes over."""
    rest = sorted(map(str, set(saved) - set(taken)))
    return [f"also has {_some(rest)}, which nothing here takes over"] if rest else []


def about_optimizer(optimizer: object, shapes: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The description saved beside an optimizer's state: its class, and its parameters' shapes."""
    about: dict[str, Any] = {CLASS: class_name(optimizer)}
    return about | {SHAPE + name: list(shape) for name, shape in shapes.items()}


def fit_of_optimizer(
    optimizer: object, shapes: Mapping[str, Sequence[int]], saved: Mapping[str, Any]
) -> Fit:
    """Compares an optimizer with the one of which the state was saved.

    Args:
        optimizer: the one that is to take it over.
        shapes: of its parameters, by name.
        saved: the saved values, :func:`about_optimizer` among them.
    """
    misfits, conversions = [], []
    if CLASS in saved:  # a checkpoint of torch's has none
        for name, shape in shapes.items():
            was = saved.get(SHAPE + name)
            if was != list(shape):
                misfits.append(f"is for parameter {name!r} of shape {was}, not {list(shape)}")
        if is_of_another_class(optimizer, saved):
            conversions.append(_new_state(saved[CLASS], optimizer))
    taken = frozenset({CLASS, *shapes, *(SHAPE + name for name in shapes)})
    return Fit(taken, tuple(conversions), tuple(misfits))


def is_of_another_class(optimizer: object, saved: Mapping[str, Any]) -> bool:
    """True if the state that was saved is that of another kind of optimizer."""
    return CLASS in saved and saved[CLASS] != class_name(optimizer)


def fit_of_local(value: object, about: object) -> Fit:
    """Compares an optimizer or scheduler of this process with :func:`about_local` of the saved."""
    if not isinstance(about, dict):
        return Fit()
    mine = about_local(value)
    if mine.get("class") != about.get("class"):
        return Fit(conversions=(_new_state(about.get("class"), value),))
    if mine.get("shapes") != about.get("shapes"):
        shapes = f"{_some(about.get('shapes', ()))}, not {_some(mine['shapes'])}"
        return Fit(misfits=(f"is for parameters of shapes {shapes}",))
    return Fit()


def about_local(value: object) -> dict[str, Any]:
    """The description saved beside the state of an optimizer or scheduler of this process."""
    if isinstance(value, torch.optim.Optimizer):
        parameters = [each for group in value.param_groups for each in group["params"]]
        shapes = [list(each.shape) for each in parameters if isinstance(each, Tensor)]
        return {"class": class_name(value), "shapes": shapes}
    is_scheduler = isinstance(value, torch.optim.lr_scheduler.LRScheduler)
    return {"class": class_name(value)} if is_scheduler else {}


def class_name(value: object) -> str:
    """The name of an object's class, with its module."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def decoded(text: str, make: Any) -> Any:
    """Calls ``make`` to decode a part of a checkpoint; any error means that the part is damaged.

    Args:
        text: what that is, for errors.
        make: called without arguments.

    Raises:
        DamagedCheckpointError: it cannot be put together.
    """
    try:
        return make()
    except DamagedCheckpointError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise DamagedCheckpointError(f"{text} is damaged: {error}") from error


def _new_state(saved: object, optimizer: object) -> str:
    return f"is the state of a {saved}, not of a {class_name(optimizer)}, which begins anew"


def _some(values: Any) -> str:
    listed = list(values)
    text = ", ".join(map(repr, listed[:5]))
    return f"{text} and {len(listed) - 5} more" if len(listed) > 5 else text
