"""Options that fit are taken; the others are refused in clear words."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch

from rpc import constants
from rpc.options import RpcBackendOptions, TensorPipeRpcBackendOptions
from rpc.transports.tensorwire import TensorWireRpcBackendOptions


def cuda(index: int) -> torch.device:
    return torch.device("cuda", index)


class TestDefaults:
    def test_are_those_of_the_original(self) -> None:
        options = TensorPipeRpcBackendOptions()
        assert options.num_worker_threads == 16
        assert options.rpc_timeout == 60.0
        assert options.init_method == "env://"
        assert options.device_maps == {}
        assert options.devices == []

    def test_constants_are_those_of_the_original(self) -> None:
        assert constants.DEFAULT_RPC_TIMEOUT_SEC == 60.0
        assert constants.UNSET_RPC_TIMEOUT == -1.0
        assert constants.DEFAULT_SHUTDOWN_TIMEOUT == 0
        assert constants.DEFAULT_NUM_WORKER_THREADS == 16
        assert constants.DEFAULT_INIT_METHOD == "env://"

    def test_bring_up_is_bounded_and_shutdown_is_not(self) -> None:
        assert RpcBackendOptions().bring_up_timeout == 300.0
        assert RpcBackendOptions().shutdown_timeout is None


class TestValues:
    def test_can_be_read_and_written(self) -> None:
        options = TensorPipeRpcBackendOptions()
        options.rpc_timeout = 5
        options.init_method = "tcp://localhost:1"
        options.num_worker_threads = 3
        options.devices = [1]
        options.device_maps = {"b": {0: 1}}
        options.bring_up_timeout = 7
        options.shutdown_timeout = 8
        assert (options.rpc_timeout, options.bring_up_timeout) == (5.0, 7.0)
        assert (options.init_method, options.num_worker_threads) == ("tcp://localhost:1", 3)
        assert (options.devices, options.device_maps) == ([cuda(1)], {"b": {cuda(0): cuda(1)}})
        assert options.shutdown_timeout == 8.0

    def test_of_tensorpipe_are_given_by_keyword_only(self) -> None:
        with pytest.raises(TypeError):
            TensorPipeRpcBackendOptions(8)  # type: ignore[misc]

    def test_a_backend_of_ones_own_may_subclass(self) -> None:
        class Mine(RpcBackendOptions):
            def __init__(self, extra: int) -> None:
                RpcBackendOptions.__init__(self, 3.0)
                self.extra = extra

        assert (Mine(1).rpc_timeout, Mine(1).init_method, Mine(1).extra) == (3.0, "env://", 1)

    @pytest.mark.parametrize("value", [timedelta(seconds=1), "60", None, True])
    def test_a_timeout_is_a_number(self, value: object) -> None:
        with pytest.raises(TypeError, match="incompatible constructor arguments: rpc_timeout="):
            RpcBackendOptions(rpc_timeout=value)  # type: ignore[arg-type]

    @pytest.mark.parametrize("value", [-1, -0.5, float("nan"), float("inf")])
    def test_a_timeout_is_finite_and_not_negative(self, value: float) -> None:
        with pytest.raises(ValueError, match=f"rpc_timeout={value}"):
            RpcBackendOptions(rpc_timeout=value)

    def test_there_has_to_be_time_to_meet(self) -> None:
        with pytest.raises(ValueError, match="bring_up_timeout=0"):
            RpcBackendOptions(bring_up_timeout=0)

    def test_a_group_meets_within_a_billion_seconds(self) -> None:
        assert RpcBackendOptions(bring_up_timeout=10**9).bring_up_timeout == 1e9
        with pytest.raises(ValueError, match=r"bring_up_timeout=2e\+20 must be at most 1e\+09 sec"):
            RpcBackendOptions(bring_up_timeout=2e20)

    @pytest.mark.parametrize(("value", "error"), [(3, TypeError), ("localhost:1", ValueError)])
    def test_an_init_method_is_a_url(self, value: object, error: type[Exception]) -> None:
        with pytest.raises(error, match="init_method="):
            RpcBackendOptions(init_method=value)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("value", "error"), [(0, ValueError), (-4, ValueError), (1.5, TypeError), (True, TypeError)]
    )
    def test_threads_are_counted(self, value: object, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"num_worker_threads={value}"):
            TensorPipeRpcBackendOptions(num_worker_threads=value)  # type: ignore[arg-type]

    def test_tensorpipe_opens_no_connection_again(self) -> None:
        with pytest.raises(TypeError, match="link_resume_timeout"):
            TensorPipeRpcBackendOptions(link_resume_timeout=5.0)  # type: ignore[call-arg]

    def test_transports_are_a_list_of_names(self) -> None:
        with pytest.raises(TypeError, match="_transports='uv'"):
            TensorPipeRpcBackendOptions(_transports="uv")
        wrong: Any = 5
        with pytest.raises(TypeError, match="_channels=5 is a int, not a list of names"):
            TensorPipeRpcBackendOptions(_channels=wrong)

    @pytest.mark.parametrize("kind", [TensorPipeRpcBackendOptions, TensorWireRpcBackendOptions])
    def test_a_transport_or_channel_that_torch_does_not_know_is_refused_for_every_backend(
        self, kind: type[TensorPipeRpcBackendOptions]
    ) -> None:
        with pytest.raises(
            RuntimeError, match=r"Unknown transport: zz, in _transports=\['uv', 'zz"
        ):
            kind(_transports=["uv", "zz"])
        with pytest.raises(RuntimeError, match=r"Unknown channel: zz, .* there are: basic, cma, "):
            kind(_channels=["zz"])

    @pytest.mark.parametrize("kind", [TensorPipeRpcBackendOptions, TensorWireRpcBackendOptions])
    def test_torchs_transports_and_channels_are_accepted(
        self, kind: type[TensorPipeRpcBackendOptions]
    ) -> None:
        kind(_transports=["ibv", "shm", "uv"], _channels=["cuda_ipc", "cma", "mpt_uv", "basic"])


class TestDeviceMaps:
    def test_devices_may_be_numbers_names_or_devices(self) -> None:
        options = TensorPipeRpcBackendOptions(device_maps={"b": {0: "cuda:1", "cpu": cuda(0)}})
        assert options.device_maps == {"b": {cuda(0): cuda(1), torch.device("cpu"): cuda(0)}}

    def test_what_is_read_is_a_copy(self) -> None:
        options = TensorPipeRpcBackendOptions(device_maps={"b": {0: 1}}, devices=[0])
        options.device_maps["b"][cuda(7)] = cuda(7)
        options.devices.append(cuda(7))
        assert options.device_maps == {"b": {cuda(0): cuda(1)}}
        assert options.devices == [cuda(0)]

    def test_maps_for_one_worker_add_up(self) -> None:
        options = TensorPipeRpcBackendOptions(device_maps={"b": {0: 1}})
        options.set_device_map("b", {1: 0})
        options.set_device_map("b", {0: 1})
        options.set_device_map("c", {0: 0})
        assert options.device_maps == {
            "b": {cuda(0): cuda(1), cuda(1): cuda(0)},
            "c": {cuda(0): cuda(0)},
        }

    def test_two_sources_cannot_share_a_target(self) -> None:
        with pytest.raises(ValueError, match="`device_map` only supports 1-to-1 mapping"):
            TensorPipeRpcBackendOptions(device_maps={"b": {0: 1, 2: 1}})

    def test_what_is_no_map_is_named(self) -> None:
        wrong: Any = "cuda:0"
        with pytest.raises(TypeError, match="device_maps='cuda:0' is a str, not a map from"):
            TensorPipeRpcBackendOptions(device_maps=wrong)
        with pytest.raises(TypeError, match="device_map='cuda:0' is a str, not a map of"):
            TensorPipeRpcBackendOptions(device_maps={"b": wrong})

    @pytest.mark.parametrize(
        ("device", "error"), [("foo", RuntimeError), (-1, RuntimeError), (1.5, TypeError)]
    )
    def test_what_is_no_device_is_named(self, device: Any, error: type[Exception]) -> None:
        with pytest.raises(error, match=f"{device!r} is no device; give the number of a CUDA"):
            TensorPipeRpcBackendOptions(device_maps={"b": {0: device}})
        with pytest.raises(error, match=f"{device!r} is no device; give the number of a CUDA"):
            TensorPipeRpcBackendOptions(devices=[device])

    def test_a_worker_that_is_not_given_by_name_is_named(self) -> None:
        by_rank: Any = 1
        with pytest.raises(TypeError, match="name of the destination, but got 1, which is a int"):
            TensorPipeRpcBackendOptions(device_maps={by_rank: {0: 1}})
        with pytest.raises(TypeError, match="name of the destination, but got 1, which is a int"):
            TensorPipeRpcBackendOptions().set_device_map(by_rank, {0: 1})

    @pytest.mark.parametrize("devices", [5, "cuda:0"])
    def test_devices_are_a_list(self, devices: Any) -> None:
        with pytest.raises(TypeError, match=f"devices={devices!r} is a .*not a list of CUDA"):
            TensorPipeRpcBackendOptions(devices=devices)
        with pytest.raises(TypeError, match=f"devices={devices!r} is a .*not a list of CUDA"):
            TensorPipeRpcBackendOptions().set_devices(devices)

    def test_a_source_cannot_have_two_targets(self) -> None:
        options = TensorPipeRpcBackendOptions(device_maps={"b": {0: 1}})
        with pytest.raises(
            ValueError,
            match="`set_device_map` only supports 1-to-1 mapping, trying to map cuda:0 to cuda:2 "
            "and cuda:1",
        ):
            options.set_device_map("b", {0: 2})
        assert options.device_maps == {"b": {cuda(0): cuda(1)}}

    def test_devices_are_cuda_devices(self) -> None:
        options = TensorPipeRpcBackendOptions()
        options.set_devices([0, "cuda:1", cuda(2)])
        assert options.devices == [cuda(0), cuda(1), cuda(2)]
        with pytest.raises(ValueError, match="`set_devices` expect a list of CUDA devices"):
            options.set_devices(["cpu"])
