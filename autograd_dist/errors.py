"""What distributed autograd raises of its own accord.

RpcError
├── BackwardError         a backward pass failed, here or on another worker
└── UnknownContextError   no autograd context with that id on this worker
"""

from __future__ import annotations

from rpc.errors import RpcError


class BackwardError(RpcError):
    """A distributed backward pass failed; the text starts with where and why."""


class UnknownContextError(RpcError):
    """There is no such context here: it never was, or it was released."""

    def __init__(self, context_id: int) -> None:
        super().__init__(f"Could not find autograd context with id: {context_id}")
        self.context_id = context_id

    def __reduce__(self) -> tuple[type[UnknownContextError], tuple[int]]:
        return type(self), (self.context_id,)
