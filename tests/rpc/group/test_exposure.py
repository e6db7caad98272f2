"""Warnings of groups that strangers can reach."""

from __future__ import annotations

import pytest

from rpc.devices import DeviceInfo
from rpc.group.exposure import warn_if_exposed
from rpc.transports.tensorpipe.address import TensorPipeAddress


def warning(caplog: pytest.LogCaptureFixture) -> str:
    text = caplog.text
    caplog.clear()
    return text


def test_a_group_beyond_the_loopback_interface_without_a_key_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    warn_if_exposed(0, ["127.0.0.1", "10.1.2.3"], can_have_key=True, has_key=False)
    told = warning(caplog)
    assert "no group_key" in told
    assert "10.1.2.3" in told
    assert "127.0.0.1" not in told
    assert "RPC_GROUP_KEY_FILE" in told


def test_one_over_tensorpipe_names_the_backend_that_has_a_key(
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = "mpt://0.uv+tcp://192.0.2.7:4242,shm://x;1.ibv+tcp://[2001:db8::7]:77"
    address = TensorPipeAddress(url, DeviceInfo(), "")
    assert address.listens_at() == ["192.0.2.7", "2001:db8::7"]
    warn_if_exposed(0, address.listens_at(), can_have_key=False, has_key=False)
    told = warning(caplog)
    assert "TENSORPIPE" in told
    assert "TENSORWIRE" in told
    assert "192.0.2.7, 2001:db8::7" in told


@pytest.mark.parametrize(
    ("rank", "hosts", "has_key"),
    [(0, ["10.1.2.3"], True), (0, ["127.0.0.1", "::1"], False), (1, ["10.1.2.3"], False)],
    ids=["key", "loopback", "another worker than rank 0"],
)
def test_otherwise_nothing_is_said(
    rank: int, hosts: list[str], has_key: bool, caplog: pytest.LogCaptureFixture
) -> None:
    warn_if_exposed(rank, hosts, can_have_key=True, has_key=has_key)
    assert warning(caplog) == ""
