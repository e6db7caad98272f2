"""The future of a call, which knows the call's number."""

from __future__ import annotations

from typing import TypeVar

from rpc.outcomes.futures import Future

T = TypeVar("T")


class CallFuture(Future[T]):
    """The future of a call, which can be found by it among thousands.

    Attributes:
        number: what the call table calls the request whose outcome comes here; 0 for none yet.
    """

    __slots__ = ("number",)

    number: int
