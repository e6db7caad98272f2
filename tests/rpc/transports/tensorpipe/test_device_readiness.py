"""A peer understands the question for its devices, and says what is in the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rpc.transports.tensorpipe.device_readiness import make_ready, question

DEVICES = [torch.device("cpu"), torch.device("cuda", 0), torch.device("cuda", 1)]


def test_a_peer_is_asked_for_the_devices_that_the_map_leads_to() -> None:
    used: list[torch.device] = []
    agent: Any = SimpleNamespace(use=used.extend)
    asked = question({torch.device("cuda", 5 + at): device for at, device in enumerate(DEVICES)})
    assert make_ready(agent, asked.payload) == ""
    assert used == DEVICES


@pytest.mark.parametrize("payload", [b"cuda:0", b"no device", b"\xff"])
def test_whatever_is_in_the_way_is_said(payload: bytes) -> None:
    def fail(devices: object) -> None:
        raise RuntimeError("no driver")

    agent: Any = SimpleNamespace(use=fail)
    assert "Error: " in make_ready(agent, payload)
