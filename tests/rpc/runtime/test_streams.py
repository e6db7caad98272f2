"""Values are ready where they are used, whatever stream made them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from rpc.calls import packing
from rpc.outcomes.futures import Future
from rpc.outcomes.slot import Slot
from rpc.rrefs.keeper import ReferenceKeeper
from rpc.rrefs.transfer import Adopted
from rpc.runtime import streams
from rpc.transports.base import Frame, FrameKind
from rpc.transports.loopback import copy
from rpc.wire.tensor_table import pack_tensors
from tests.fake_streams import Gpus, GpuTensor, gpus

__all__ = ["gpus"]


def elsewhere(work: Callable[[], object]) -> None:
    """Runs ``work`` to its end on another thread."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class TestHandOver:
    def test_a_value_left_on_one_stream_is_ready_on_another_that_takes_it(self, gpus: Gpus) -> None:
        with gpus.side_stream():
            tensor = gpus.tensor()
            streams.leave({"deep": [(tensor,)]})
        with gpus.side_stream():
            assert not gpus.is_usable(tensor)
            streams.take({"deep": [(tensor,)]})
            assert gpus.is_usable(tensor)

    def test_the_default_streams_wait_for_nothing_that_was_made_on_them(self, gpus: Gpus) -> None:
        tensor = gpus.tensor()
        streams.leave(tensor)
        streams.take(tensor)
        assert (gpus.default(0).waits, tensor.keepers) == (0, set())

    def test_work_on_another_device_is_waited_for_as_well(self, gpus: Gpus) -> None:
        """A kernel of one device may write to another one's memory."""
        with gpus.side_stream(1) as side:
            number = side.queue()
            streams.leave(gpus.tensor(index=0))
        assert gpus.default(1).is_behind(side, number)

    def test_tensors_concern_their_own_devices_only(self, gpus: Gpus) -> None:
        with gpus.side_stream(1), gpus.side_stream(0):
            tensor = gpus.tensor(index=0)
            streams.leave_tensors((torch.ones(1), tensor))
        assert gpus.is_usable(tensor)
        assert gpus.default(1).waits == 0

    def test_memory_stays_until_the_one_who_took_it_is_done(self, gpus: Gpus) -> None:
        tensor = gpus.tensor()
        with gpus.side_stream() as side:
            streams.take_tensors((tensor,))
        assert tensor.keepers == {side}

    def test_without_cuda_nothing_is_asked_of_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: object) -> None:
            raise AssertionError("there is no CUDA")

        monkeypatch.setattr(torch.cuda, "current_stream", fail)
        monkeypatch.setattr(torch.cuda, "device_count", fail)
        for each in (streams.leave, streams.take):
            each(torch.ones(1))
        for each in (streams.leave_tensors, streams.take_tensors):
            each((torch.ones(1),))
        assert streams.devices() == []


class _Stubborn:
    def __reduce_ex__(self, _: object) -> Any:
        raise RuntimeError("stays here")


class TestTensorsOf:
    @pytest.mark.parametrize(
        "value",
        [
            torch.ones(1),
            (_Stubborn(), lambda: 1, threading.Lock(), [torch.ones(1)]),
            {"key": SimpleNamespace(inner=torch.ones(1), lock=threading.RLock())},
            (TestHandOver, len, SimpleNamespace.__init__, nn.Linear(2, 1, bias=False)),
            (iter([1]), (x for x in "a"), torch.float32, torch.device("cpu"), torch.ones(1)),
        ],
    )
    def test_all_are_found_beside_what_cannot_be_pickled(self, value: object) -> None:
        assert len(streams.tensors_of(value)) == 1

    def test_a_value_without_an_end_is_given_up(self) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        assert streams.tensors_of(deep) == []

    @pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC)")
    @pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
    def test_sparse_memory_is_kept_part_by_part(
        self, layout: torch.layout, monkeypatch: pytest.MonkeyPatch, gpus: Gpus
    ) -> None:
        kept: list[torch.Size] = []
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, _: kept.append(tensor.shape)
        )
        monkeypatch.setattr(GpuTensor, "record_stream", torch.Tensor.record_stream)
        sparse = torch.eye(3).to_sparse(layout=layout)
        waits = SimpleNamespace(device=sparse.device, wait_stream=lambda _: None)
        streams._hand_over([sparse], [(waits, waits)])  # type: ignore[list-item]
        assert sum(shape.numel() for shape in kept) >= 3 + 3
        assert len(kept) == (2 if layout is torch.sparse_coo else 3)


class TestBorders:
    """Values that pass from users to this library, and back."""

    def test_the_value_of_a_reference(self, gpus: Gpus) -> None:
        slot = Slot()
        with gpus.side_stream():
            tensor = gpus.tensor()
            slot.fill((tensor,))

        def use() -> None:
            with gpus.side_stream():
                (value,) = slot.wait()
                usable.append(gpus.is_usable(value))

        usable: list[bool] = []
        elsewhere(use)
        assert usable == [True]

    @pytest.mark.parametrize("get", [Future.wait, Future.value])
    def test_the_result_of_a_call(self, gpus: Gpus, get: Callable[[Future[Any]], Any]) -> None:
        future: Future[Any] = Future()

        def answer() -> None:
            with gpus.side_stream():
                future.set_result([gpus.tensor()])

        elsewhere(answer)
        with gpus.side_stream():
            assert gpus.is_usable(get(future)[0])

    def test_the_result_of_a_callback(self, gpus: Gpus) -> None:
        future: Future[Any] = Future()
        child = future.then(lambda done: (done.value(), gpus.tensor()))

        def answer() -> None:
            with gpus.side_stream():
                future.set_result(gpus.tensor())

        elsewhere(answer)
        with gpus.side_stream():
            assert all(gpus.is_usable(each) for each in child.wait())

    def test_what_arrives(self, gpus: Gpus) -> None:
        tensor = gpus.tensor()
        table, _ = pack_tensors((torch.ones(1 << 20),), -1)
        nothing = Adopted(cast(ReferenceKeeper, None))
        with gpus.side_stream():
            packing.unpack(
                b"", table, (tensor,), nothing, None, lambda payload, tensors, handles: tensors
            )
            assert gpus.is_usable(tensor)

    def test_a_copy_for_another_thread(self, gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(GpuTensor, "clone", lambda tensor: gpus.tensor(tensor.data))
        monkeypatch.setattr(GpuTensor, "detach", lambda tensor: tensor)
        with gpus.side_stream():
            (copied,) = copy(Frame(FrameKind.NOTICE, 0, b"", b"", (gpus.tensor(),))).tensors
        assert gpus.is_usable(copied)
