"""Tensors go where device maps say."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch

from rpc.errors import DeviceMapError
from rpc.transports.tensorwire import device_maps as devices
from rpc.transports.tensorwire.device_maps import PeerDeviceMap, to_device, to_host
from tests.fake_streams import Gpus, GpuTensor, Stream, gpus

__all__ = ["gpus"]

GPU0, GPU1 = torch.device("cuda:0"), torch.device("cuda:1")


def test_a_request_goes_by_the_map_and_its_reply_by_the_inverse() -> None:
    there = PeerDeviceMap("bob", {GPU0: GPU1})
    assert (there.destination(GPU0), there.inverse().destination(GPU1)) == ("cuda:1", "cuda:0")
    assert there.destination(torch.device("cpu")) == ""


def test_a_device_without_an_entry_is_refused_in_the_words_that_programs_look_for(
    gpus: Gpus,
) -> None:
    there = PeerDeviceMap("bob", {GPU0: GPU1})
    tensors = (torch.ones(1), gpus.tensor(index=1))
    words = (
        r"only supports CPU tensors by default.*`set_device_map` on "
        r"`TensorWireRpcBackendOptions`\. Request device mapping is not available for "
        r"destination bob and a tensor on device cuda:1"
    )
    with pytest.raises(DeviceMapError, match=words):
        there.check(tensors)
    with pytest.raises(DeviceMapError, match="Response device mapping is not available"):
        there.inverse().check((gpus.tensor(index=0),))
    there.check((gpus.tensor(index=0),))


def test_a_default_device_does_not_move_what_is_on_its_way_through_host_memory(
    gpus: Gpus,
) -> None:
    tensor = gpus.tensor(torch.arange(6.0).reshape(2, 3).t())
    with torch.device("meta"):
        staged = to_host(tensor)
    assert (staged.device.type, staged.stride()) == ("cpu", (1, 3))
    assert torch.equal(staged, torch.arange(6.0).reshape(2, 3).t())


def test_what_arrives_is_made_on_the_default_stream(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[Stream] = []

    def to(tensor: torch.Tensor, device: torch.device) -> GpuTensor:
        current.append(gpus.current(device))
        return gpus.tensor()

    def on(stream: Stream) -> AbstractContextManager[Stream]:
        return gpus.on(stream)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(devices.torch.cuda, "stream", on)
    with gpus.side_stream(1):
        to_device(torch.ones(1), "cuda:1")
    assert current == [gpus.default(1)]
