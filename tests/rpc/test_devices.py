"""Device maps of a group agree, or the worker at fault is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from rpc.devices import (
    DeviceInfo,
    as_device_map,
    check_devices,
    check_present,
    lands_on_device,
    reverse,
    used_devices,
    validate_device_maps,
)
from rpc.errors import DeviceMapError


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


def info(count: int = 2, devices: list[int] | None = None, **maps: dict[Any, Any]) -> DeviceInfo:
    return DeviceInfo(
        count,
        tuple(map(cuda, devices or [])),
        {to: as_device_map(device_map) for to, device_map in maps.items()},
    )


class TestDeviceInfo:
    def test_survives_the_store(self) -> None:
        original = info(4, [1, 3], b={1: 3, "cpu": "cpu"})
        assert DeviceInfo.from_json(json.loads(json.dumps(original.to_json()))) == original

    def test_devices_used_are_those_listed(self) -> None:
        assert used_devices(info(4, [3, 1], b={0: 0})) == [cuda(1), cuda(3)]

    def test_or_those_named_by_maps_in_either_direction_without_the_cpu(self) -> None:
        one = info(4, b={2: 0, "cpu": "cpu"})
        assert used_devices(one, [{cuda(1): cuda(0)}]) == [cuda(1), cuda(2)]

    def test_replies_follow_the_reverse(self) -> None:
        assert reverse({cuda(0): cuda(1)}) == {cuda(1): cuda(0)}


class TestValidation:
    def test_maps_that_fit_pass(self) -> None:
        validate_device_maps({"a": info(2, b={0: 1}), "b": info(2, [0, 1], a={"cpu": "cpu"})})

    def test_a_cpu_map_needs_no_gpu(self) -> None:
        validate_device_maps({"a": info(0, b={"cpu": "cpu"}), "b": info(0)})

    @pytest.mark.parametrize(
        ("text", "infos"),
        [
            ("Node a has duplicated devices", {"a": info(2, [1, 1])}),
            ("Node a has devices with invalid indices", {"a": info(1, [1])}),
            ("Node a has invalid target node names in its device maps", {"a": info(b={0: 0})}),
            (
                "Node a has unexpected source devices in its device map for b",
                {"a": info(2, [1], b={0: 0}), "b": info()},
            ),
            (
                "Node a has source devices with invalid indices in its device map for b",
                {"a": info(1, b={1: 0}), "b": info()},
            ),
            (
                "Node a has unexpected target devices in its device map for b",
                {"a": info(b={0: 0}), "b": info(2, [1])},
            ),
            (
                "Node a has target devices with invalid indices in its device map for b",
                {"a": info(b={0: 1}), "b": info(1)},
            ),
            (
                "Node a has duplicated target devices in its device map for b",
                {"a": DeviceInfo(2, (), {"b": {cuda(0): cuda(0), cuda(1): cuda(0)}}), "b": info()},
            ),
        ],
    )
    def test_the_worker_at_fault_is_named(self, text: str, infos: dict[str, DeviceInfo]) -> None:
        with pytest.raises(ValueError, match=text):
            validate_device_maps(infos)

    def test_workers_that_may_yet_join_may_be_mapped_to(self) -> None:
        validate_device_maps({"a": info(b={0: 0})}, all_known=False)


class TestCheckDevices:
    def test_cpu_tensors_need_no_map(self) -> None:
        check_devices([torch.ones(1)], {}, "Request", "b")

    def test_others_need_one(self) -> None:
        nowhere = torch.empty(1, device="meta")
        check_devices([nowhere], {nowhere.device: cuda(0)}, "Request", "b")
        with pytest.raises(DeviceMapError, match="Response device mapping is not available"):
            check_devices([torch.ones(1), nowhere], {}, "Response", "b")


class TestPresence:
    def test_a_device_that_is_not_there_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        check_present([torch.device("cpu"), cuda(0), cuda(1)])
        with pytest.raises(DeviceMapError, match="cuda:2, cuda:3, but this process has 2 CUDA"):
            check_present([cuda(3), cuda(0), cuda(2)])


def test_a_tensor_lands_on_a_device_if_its_map_says_so() -> None:
    here, there = torch.ones(1), torch.empty(1, device="meta")
    host = torch.device("cpu")
    assert not lands_on_device([here], {there.device: cuda(0)})
    assert not lands_on_device([there], {there.device: host})
    assert lands_on_device([here, there], {there.device: cuda(0)})
    assert lands_on_device([here], {host: cuda(0)})
