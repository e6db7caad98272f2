"""Values through the codec and back, for its tests."""

from __future__ import annotations

from typing import Any

from rpc.wire.codec import decode, encode


def round_trip(value: object) -> Any:
    encoded = encode(value)
    return decode(encoded.payload, encoded.tensors, encoded.references)


def round_trip_detached(value: object) -> Any:
    """Passes tensors on as a wire does: they arrive as new leaves."""
    encoded = encode(value)
    tensors = [t.detach().clone().requires_grad_(t.requires_grad) for t in encoded.tensors]
    return decode(encoded.payload, tensors, ())
