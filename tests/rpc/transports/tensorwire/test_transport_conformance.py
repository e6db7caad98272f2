"""TensorWire keeps the promises of every transport, over each kind of connection."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpc.transports.tensorwire import Settings, TensorWireTransport
from tests.rpc.transports.conformance import TransportConformance
from tests.rpc.transports.tensorwire.certificates import for_everybody


class TestTensorWireConformance(TransportConformance):
    @pytest.fixture(
        params=[
            Settings(),
            Settings(shared_memory_bytes=0),
            Settings(local_paths=False, bind_address="::1", bulk_connections=3),
            Settings(local_paths=False, tls=for_everybody()),
        ],
        ids=["shared memory", "unix", "tcp", "tls"],
    )
    def transports(self, request: pytest.FixtureRequest) -> Callable[[], TensorWireTransport]:
        settings: Settings = request.param
        return lambda: TensorWireTransport(settings)
