"""A process that shows what Python keeps of torch's threads, while it runs calls and after.

Prints how many calls found nothing of an earlier call on their thread, and how many
thread states are there before the group, and after it.
"""

from __future__ import annotations

import ctypes
import sys
import threading

import rpc

CALLS = 300
_here = threading.local()


def is_first() -> bool:
    """True if no call has run on this thread before."""
    first = not hasattr(_here, "seen")
    _here.seen = True
    return first


def thread_states() -> int:
    """Counts the threads that Python knows, whoever started them."""
    python = ctypes.pythonapi
    python.PyInterpreterState_Main.restype = ctypes.c_void_p
    python.PyInterpreterState_ThreadHead.restype = ctypes.c_void_p
    python.PyInterpreterState_ThreadHead.argtypes = [ctypes.c_void_p]
    python.PyThreadState_Next.restype = ctypes.c_void_p
    python.PyThreadState_Next.argtypes = [ctypes.c_void_p]
    count, state = 0, python.PyInterpreterState_ThreadHead(python.PyInterpreterState_Main())
    while state:
        count, state = count + 1, python.PyThreadState_Next(state)
    return count


if __name__ == "__main__":
    before = thread_states()
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{sys.argv[1]}")
    rpc.init_rpc("worker0", rank=0, world_size=1, rpc_backend_options=options)
    firsts = sum(rpc.rpc_sync("worker0", is_first) for _ in range(CALLS))
    rpc.shutdown()
    print(firsts, before, thread_states())
