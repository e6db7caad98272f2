"""Loads the parameter server's kernels when it is imported: processes forked later have them."""

from tensorwire.parameter_server.server.loading import load_kernels

load_kernels()
