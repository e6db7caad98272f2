"""Workers over TensorWire for several test files, and ways to look at them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from rpc.transports.tensorwire.link import Link
from tests import waiting
from tests.rpc.transports.conformance import (
    SECONDS,
    Worker,
)

Maker = Callable[..., list[Worker]]


until = partial(waiting.until, seconds=SECONDS)


def link_of(worker: Worker) -> Link | None:
    """The link that a worker opened to the worker with id 1."""
    return worker.transport.peers[1].outgoing  # type: ignore[attr-defined,no-any-return]
