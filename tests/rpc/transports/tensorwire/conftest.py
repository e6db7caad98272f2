"""Fixtures that several test files here share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rpc.transports.tensorwire import Settings, TensorWireTransport
from rpc.worker_info import WorkerInfo
from tests.rpc.transports.conformance import (
    Worker,
    introduce,
)
from tests.rpc.transports.tensorwire.transports import (
    Maker,
)
from tests.rpc.transports.tensorwire.wires import (
    Wire,
)


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes started workers that know each other; closes them."""
    made: list[Worker] = []

    def workers(*each: Settings, known: bool = True) -> list[Worker]:
        found = [
            Worker(TensorWireTransport(settings), WorkerInfo(f"worker{i}", i))
            for i, settings in enumerate(each)
        ]
        made.extend(found)
        for worker in found:
            worker.start()
        introduce(found if known else ())
        return found

    yield workers
    for worker in made:
        worker.close(0.2)


@pytest.fixture
def wire() -> Iterator[Wire]:
    made = Wire()
    yield made
    made.close()
