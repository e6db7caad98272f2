"""What torch's profilers get to see of a backward pass.

A profiler records the thread that started it, and the thread that runs a backward pass
does all the pass's work on its worker (``home``). The spans are named as torch names its
own, for programs that look for them.
"""

from __future__ import annotations

PASS = "torch::distributed::autograd::backward"
SEND = "torch::distributed::autograd::SendRpcBackward"
