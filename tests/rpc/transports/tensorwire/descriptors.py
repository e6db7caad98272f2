"""Descriptors to pass on, of which is seen what became of them."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from contextlib import contextmanager

from tests.rpc.transports.conformance import SECONDS


@contextmanager
def to_be_closed() -> Iterator[int]:
    """A descriptor that, with all its copies, must be closed by the end of the block."""
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb") as pipe:
        yield writing
        assert select.select([pipe], [], [], SECONDS)[0], "the descriptor is closed"
        assert pipe.read() == b""
