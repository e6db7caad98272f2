"""CUDA streams without a GPU: who has waited for whom, and who keeps whose memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rpc.runtime import streams


class Stream:
    """Queues work that never runs, and knows whose work comes before it."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queued = 0
        self._seen: dict[Stream, int] = {}

    def queue(self) -> int:
        """Some work; its number."""
        self._queued += 1
        return self._queued

    def wait_stream(self, other: Stream) -> None:
        """Lets what comes next wait for all that the other one has now."""
        for stream, number in (*other._seen.items(), (other, other._queued)):
            self._seen[stream] = max(number, self._seen.get(stream, 0))

    def is_behind(self, other: Stream, number: int) -> bool:
        """True if what comes next waits for that work of the other one."""
        return other is self or self._seen.get(other, 0) >= number

    @property
    def waits(self) -> int:
        """For how many streams."""
        return len(self._seen)


class GpuTensor(torch.Tensor):
    """In host memory, but says that it is on a device."""

    pretended: torch.device
    made_on: Stream
    made_as: int
    keepers: set[Stream]

    is_cuda = True  # type: ignore[assignment]
    is_cpu = False  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.pretended

    def record_stream(self, s: Any) -> None:
        """Keeps the memory until the stream is done with it."""
        self.keepers.add(s)

    def is_ready_on(self, stream: Stream) -> bool:
        """True if work of the stream sees the values, and nobody else gets the memory before."""
        return stream.is_behind(self.made_on, self.made_as) and (
            stream is self.made_on or stream in self.keepers
        )


class Gpus:
    """Two devices; threads start with the default streams of both."""

    def __init__(self) -> None:
        self._default = {index: Stream(torch.device("cuda", index)) for index in range(2)}
        self._here = threading.local()

    def default(self, device: torch.device | int) -> Stream:
        """A device's default stream."""
        return self._default[device if isinstance(device, int) else device.index]

    def current(self, device: torch.device | int) -> Stream:
        """The running thread's stream of a device."""
        default = self.default(device)
        chosen: dict[torch.device, Stream] = getattr(self._here, "chosen", {})
        return chosen.get(default.device, default)

    @contextmanager
    def side_stream(self, index: int = 0) -> Iterator[Stream]:
        """A new stream, current on this thread."""
        with self.on(Stream(torch.device("cuda", index))) as stream:
            yield stream

    @contextmanager
    def on(self, stream: Stream) -> Iterator[Stream]:
        """Has a stream current on this thread."""
        before: dict[torch.device, Stream] = getattr(self._here, "chosen", {})
        self._here.chosen = {**before, stream.device: stream}
        try:
            yield stream
        finally:
            self._here.chosen = before

    def tensor(self, values: torch.Tensor | None = None, index: int = 0) -> GpuTensor:
        """One that the current stream makes."""
        data = torch.ones(2) if values is None else values
        tensor = data.as_subclass(GpuTensor)
        tensor.pretended = torch.device("cuda", index)
        tensor.made_on = self.current(index)
        tensor.made_as = tensor.made_on.queue()
        tensor.keepers = set()
        return tensor

    def is_usable(self, tensor: torch.Tensor) -> bool:
        """True if the running thread may use it without more ado."""
        assert isinstance(tensor, GpuTensor)
        return tensor.is_ready_on(self.current(tensor.device))


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Gpus:
    """Two devices in place of torch's."""
    fake = Gpus()
    monkeypatch.setattr(streams, "is_in_use", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "default_stream", fake.default)
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current)
    return fake
