"""The errors that distributed autograd raises of its own accord.

RpcError
├── BackwardError                   a backward pass failed, here or on another worker
│   └── WorkerLostInBackwardError   because a worker was lost (also a WorkerLostError)
└── UnknownContextError             no autograd context with that id on this worker
"""

from __future__ import annotations

from typing import Any

from rpc.errors import RpcError, WorkerLostError


class BackwardError(RpcError):
    """A distributed backward pass failed; the text starts with where and why."""


class WorkerLostInBackwardError(BackwardError, WorkerLostError):
    """A distributed backward pass failed as a worker was lost, which may be known elsewhere first.

    Attributes:
        name: the lost worker's name.
        incarnation: which life of that name was lost.
        reason: what was observed, for people.
    """

    def __init__(self, text: str, name: str, incarnation: int, reason: str) -> None:
        super().__init__(name, incarnation, reason)
        self.args = (text,)

    def __reduce__(self) -> tuple[type[WorkerLostInBackwardError], tuple[Any, ...]]:
        return type(self), (self.args[0], self.name, self.incarnation, self.reason)


class UnknownContextError(RpcError):
    """There is no such context here: it never was, or it was released."""

    def __init__(self, context_id: int) -> None:
        super().__init__(f"Could not find autograd context with id: {context_id}")
        self.context_id = context_id

    def __reduce__(self) -> tuple[type[UnknownContextError], tuple[int]]:
        return type(self), (self.context_id,)
