"""Groups in one process: what they can be made of."""

from __future__ import annotations

from typing import Any

import pytest

import rpc
from rpc.testing import connect, local_group


def test_each_worker_has_a_name_of_its_own() -> None:
    with pytest.raises(ValueError, match="needs a name of its own, but 'alice' is repeated"):
        connect("alice", "bob", "alice")


def test_options_for_init_rpc_are_not_those_of_an_agent() -> None:
    wrong: Any = rpc.TensorWireRpcBackendOptions()
    with (
        pytest.raises(TypeError, match="are a TensorWireRpcBackendOptions, not AgentOptions"),
        local_group("alice", options=wrong),
    ):
        pass
