"""``FAULTY_TENSORPIPE`` and ``FAULTY_TENSORWIRE``: messages fail or come late, by type.

For tests of programs written for ``torch.distributed.rpc._testing``. Like there,
importing this package registers them. New tests are better off with
``rpc.testing``: whole groups in one process, and time that the test moves.
"""

from rpc._testing.backend import (
    FAULTY_TENSORPIPE,
    FAULTY_TENSORWIRE,
    FaultyTensorPipeAgent,
    FaultyTensorPipeRpcBackendOptions,
    FaultyTensorWireRpcBackendOptions,
    is_available,
    register,
)

register()

__all__ = [
    "FAULTY_TENSORPIPE",
    "FAULTY_TENSORWIRE",
    "FaultyTensorPipeAgent",
    "FaultyTensorPipeRpcBackendOptions",
    "FaultyTensorWireRpcBackendOptions",
    "is_available",
]
