"""Loops over ids and rows: numba's where it is installed, else torch's, with the same results.

Both modules have the same functions; numba's has ``UPDATES`` besides. :func:`kernels` returns the
one that is used in this process. In workers of rpcrun, whose start others wait for, torch's work
until numba's are compiled (``meanwhile.py``).
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
from types import ModuleType
from typing import Final, cast

from tensorwire.parameter_server.kernels import meanwhile

_logger = logging.getLogger("tensorwire")

_PACKAGE: Final = "tensorwire.parameter_server.kernels"


@functools.cache
def kernels() -> ModuleType:
    """The module of kernels for this installation; says once if it is the slow one."""
    name = f"{_PACKAGE}.numba_kernels"
    is_awaited = meanwhile.WORKER in os.environ and importlib.util.find_spec("numba") is not None
    if is_awaited and not meanwhile.are_compiled():
        return cast(ModuleType, meanwhile.Meanwhile(torch_only(), name))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        _logger.warning(
            "the parameter server runs without numba (%s), several times slower; "
            "install tensorwire[ps]",
            error,
        )
        return torch_only()


def torch_only() -> ModuleType:
    """The kernels that need no numba."""
    return importlib.import_module(f"{_PACKAGE}.torch_kernels")
