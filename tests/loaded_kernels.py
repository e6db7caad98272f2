"""Loads the parameter server's kernels when it is imported: processes forked later have them."""

import importlib.util

from tensorwire.parameter_server.kernels import meanwhile
from tensorwire.parameter_server.server.loading import compile_kernels, load_kernels

if importlib.util.find_spec("numba") is not None and not meanwhile.are_compiled():
    compile_kernels()
load_kernels()
