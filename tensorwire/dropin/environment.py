"""Reaches the Python processes that a redirected one starts.

They inherit two environment variables. ``PYTHONPATH`` begins with the folder ``startup``, whose
``sitecustomize`` Python runs when it starts. It installs the redirection as soon as the process
imports torch. ``TENSORWIRE_DROPIN`` says where this package is, ``TENSORWIRE_DROPIN_BACKEND``
which backend was asked for. Processes that are started
with ``-I``, ``-E`` or ``-S`` do not look at these. Forked processes need nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "TENSORWIRE_DROPIN"
BACKEND_VARIABLE = "TENSORWIRE_DROPIN_BACKEND"
_VARIABLES = (VARIABLE, BACKEND_VARIABLE)
_STARTUP = str(Path(__file__).parent / "startup")
_ROOT = str(Path(__file__).parents[2])


def environment(
    base: Mapping[str, str] | None = None, backend: str | None = None
) -> dict[str, str]:
    """Returns the environment in which a Python process redirects torch's names by itself.

    Args:
        base: the environment to begin with; default that of this process.
        backend: see :func:`tensorwire.dropin.install`.
    """
    variables = dict(os.environ if base is None else base)
    path = [part for part in _parts(variables) if part != _STARTUP]
    variables["PYTHONPATH"] = os.pathsep.join([_STARTUP, *path])
    variables[VARIABLE] = _ROOT
    if backend is not None:
        variables[BACKEND_VARIABLE] = backend
    return variables


def environment_without(base: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what :func:`environment` adds."""
    variables = {name: value for name, value in base.items() if name not in _VARIABLES}
    path = [part for part in _parts(variables) if part != _STARTUP]
    variables.pop("PYTHONPATH", None)
    if path:
        variables["PYTHONPATH"] = os.pathsep.join(path)
    return variables


def _parts(variables: Mapping[str, str]) -> list[str]:
    return [part for part in variables.get("PYTHONPATH", "").split(os.pathsep) if part]
