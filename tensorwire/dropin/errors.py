"""The error of this package."""

from __future__ import annotations

from rpc import RpcError


class DropinError(RpcError):
    """Torch's names cannot change what they stand for now; the text says what to do first."""
