"""Loads a checkpoint in two passes: first everything is compared, at all owners; then it is taken.

So what does not fit is one error, and nothing has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

from torch import nn

import rpc
from tensorwire.checkpoint import writing
from tensorwire.checkpoint.errors import CheckpointError, MismatchError, NotSavedError
from tensorwire.checkpoint.files import Checkpoint
from tensorwire.checkpoint.fitting import Fit, fit_of_local, fit_of_module, left_over
from tensorwire.checkpoint.spread import Source, SpreadOut, as_spread_out

_logger: Final = logging.getLogger("tensorwire")


@runtime_checkable
class Stateful(Protocol):
    """An object that has its state in this process, such as a module of torch."""

    def state_dict(self) -> Any:
        """Returns the state."""

    def load_state_dict(self, state_dict: Any) -> Any:
        """Takes over a state."""


class Loading:
    """One loading of one checkpoint.

    Args:
        saved: the checkpoint.
        objects: what was saved of the kinds of local objects, by name.
        strict: whether conversions are errors.
    """

    def __init__(self, saved: Checkpoint, objects: Any, strict: bool) -> None:
        self._saved = saved
        self._objects: dict[str, Any] = objects if isinstance(objects, dict) else {}
        self._strict = strict
        self._shares: dict[str, list[tuple[str, Source]]] = {}
        self._local: dict[str, Fit] = {}
        self._actions: list[tuple[str, Callable[[], object]]] = []

    def prepare(self, plain: Any, value: Any, name: str) -> Any:
        """Notes which object takes over what; returns the value with the saved plain data."""
        spread = as_spread_out(value)
        if spread is not None:
            return self._prepare_spread(plain, value, spread, name)
        if isinstance(value, dict) and isinstance(plain, dict):
            mine = {
                key: self.prepare(plain[key], each, join(name, key))
                for key, each in value.items()
                if self._has(plain, key, each, name)
            }
            return {**plain, **mine}
        if isinstance(value, (list, tuple)) and isinstance(plain, (list, tuple)):
            return self._prepare_list(plain, value, name)
        if isinstance(value, Stateful):
            return self._prepare_local(plain, value, name)
        if _has_objects(value):
            raise MismatchError(
                f"{name!r} in {self._saved.path} is a {type(plain).__name__}, and not what is to "
                f"take it over, a {type(value).__name__}"
            )
        return plain

    def _prepare_list(self, plain: Any, value: Any, name: str) -> Any:
        if len(value) != len(plain):
            if not any(map(_takes_a_state, value)):
                return plain
            raise MismatchError(f"{name!r} has {len(plain)} items, not {len(value)}")
        pairs = enumerate(zip(plain, value, strict=True))
        return type(value)(self.prepare(p, v, join(name, n)) for n, (p, v) in pairs)

    def _prepare_spread(self, plain: Any, value: Any, spread: SpreadOut, name: str) -> Any:
        self._actions.append((name, partial(spread.load_checkpoint_common, plain)))
        for share in spread.checkpoint_shares():
            self._shares.setdefault(share.worker, []).append((name, share.source))
        return value

    def _prepare_local(self, plain: Any, value: Stateful, name: str) -> Any:
        fit = fit_of_local(value, self._objects.get(name))
        if isinstance(value, nn.Module):
            fit = fit_of_module(value, plain)
        self._local[name] = fit
        begins_anew = fit.conversions and not isinstance(value, nn.Module)
        if not begins_anew:
            self._actions.append((name, partial(value.load_state_dict, plain)))
        return value

    def _has(self, plain: dict[str, Any], key: str, value: Any, name: str) -> bool:
        """Says whether something was saved under a key; an object needs it."""
        if key in plain:
            return True
        if _takes_a_state(value) or _has_objects(value):
            raise NotSavedError(f"the checkpoint has nothing by the name {join(name, key)!r}")
        return False

    def check(self) -> None:
        """Compares everything, at all owners.

        Raises:
            MismatchError: something does not fit, or would have to be converted.
        """
        path = str(self._saved.path)
        calls = [
            rpc.rpc_async(worker, writing.check_part, (path, shares), timeout=0)
            for worker, shares in self._shares.items()
        ]
        fits: dict[str, list[Fit]] = {name: [fit] for name, fit in self._local.items()}
        for call in calls:
            for name, fit in call.wait():
                fits.setdefault(name, []).append(fit)
        for name, judged in fits.items():
            self._judge(name, judged)

    def _judge(self, name: str, fits: list[Fit]) -> None:
        misfits = [each for fit in fits for each in fit.misfits]
        if not misfits and name not in self._local:
            taken = [each for fit in fits for each in fit.taken]
            if taken:
                misfits = left_over(writing.saved_values(self._saved, name), taken)
        conversions = list(dict.fromkeys(each for fit in fits for each in fit.conversions))
        which = f"{name!r} in {self._saved.path}"
        if misfits:
            raise MismatchError(f"{which} {'; '.join(dict.fromkeys(misfits))}")
        if conversions and self._strict:
            raise MismatchError(
                f"{which} would have to be converted: {'; '.join(conversions)}; "
                "checkpoint.load(..., strict=False) does so"
            )
        for each in conversions:
            _logger.warning("%s is converted: %s", which, each)

    def run(self) -> None:
        """Has everybody take over what was saved.

        Raises:
            MismatchError: somebody cannot.
        """
        for name, action in self._actions:
            try:
                action()
            except CheckpointError:
                raise
            except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise MismatchError(
                    f"{name!r} in {self._saved.path} cannot be loaded: {error}"
                ) from error
        calls = [
            rpc.rpc_async(worker, writing.read_part, (str(self._saved.path), each), timeout=0)
            for worker, each in self._shares.items()
        ]
        for call in calls:
            call.wait()


def join(name: str, key: object) -> str:
    """The name of what lies within a named value."""
    return f"{name}/{key}" if name else str(key)


def _takes_a_state(value: Any) -> bool:
    return as_spread_out(value) is not None or isinstance(value, Stateful)


def _has_objects(value: Any) -> bool:
    """True for a dict, list or tuple with an object in it."""
    if not isinstance(value, (dict, list, tuple)):
        return False
    inside = value.values() if isinstance(value, dict) else value
    return any(_takes_a_state(each) or _has_objects(each) for each in inside)
