"""Our own transport: sockets and shared memory, in plain Python.

``framing`` and ``handshake`` decide what bytes mean and do no I/O;
``channel`` moves bytes over one socket; ``link`` joins the channels of one
direction between two workers; ``replies``, ``requests`` and ``bulk`` are the
threads that read; ``reconnect`` replaces connections that break; ``transport`` puts them together.
"""

from rpc.transports.tensorwire.options import TensorWireRpcBackendOptions
from rpc.transports.tensorwire.settings import Settings
from rpc.transports.tensorwire.transport import TensorWireTransport

__all__ = ["Settings", "TensorWireRpcBackendOptions", "TensorWireTransport"]
