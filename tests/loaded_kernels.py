"""Loads the parameter server's kernels when it is imported: processes forked later have them.

With one thread of torch meanwhile: a team of threads that OpenMP has made here does not exist in a
forked process, which would wait for it in its first large operation.
"""

import importlib.util

import torch

from tensorwire.parameter_server.kernels import meanwhile
from tensorwire.parameter_server.server.loading import compile_kernels, load_kernels

_threads = torch.get_num_threads()
torch.set_num_threads(1)
if importlib.util.find_spec("numba") is not None and not meanwhile.are_compiled():
    compile_kernels()
load_kernels()
torch.set_num_threads(_threads)
