"""``python -m tensorwire.parameter_server``: a server, as rpcrun starts one.

::

    rpcrun --role ps:2,service=tensorwire.parameter_server --role trainer:2 train.py
"""

import gc

import rpc
from tensorwire.parameter_server import serve
from tensorwire.parameter_server.server.loading import load_kernels


def main() -> None:
    """Joins the group that the environment names, and serves."""
    load_kernels()
    rpc.init_rpc()
    serve()
    gc.freeze()  # as the process ends, Python would collect all of torch and numba for seconds


if __name__ == "__main__":
    main()
