"""Processes for tests: each begins with torch and our packages imported.

One process imports them, once, and forks the others; a process that imported torch for
itself would spend seconds on it. It has neither threads nor workers of its own, so that
its children know of nothing that a process which was started alone would not know of.
A package that is not installed is left out. The kernels of parameter servers, too, are loaded once,
and of all that the collector never looks at it again.
"""

from __future__ import annotations

import functools
import multiprocessing
from multiprocessing.context import ForkServerContext

IMPORTED = ["torch", "torch.distributed.optim"]
IMPORTED += ["rpc", "autograd_dist", "optim_dist", "remote_module"]
# Optimizers import the first with their first step; tutorials read data and draw with the others.
IMPORTED += ["torch._dynamo", "sklearn.datasets", "matplotlib.figure", "tensorwire.launch.main"]
IMPORTED += ["tests.loaded_kernels"]
IMPORTED += ["tests.frozen"]  # the last


@functools.cache
def ready_made() -> ForkServerContext:
    """The maker of such processes. Tests that use it need the fixture ``process_server``."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context
