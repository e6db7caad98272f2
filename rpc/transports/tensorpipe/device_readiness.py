"""Makes a peer's devices ready before the first tensor for them is sent.

torch takes memory for a tensor as soon as the message comes, and the process ends if it
does not know the device by then. A peer learns of our device map when it learns of us,
and we may know it, and call it, before that. So the first request that leads to its
devices asks it to make them ready, and waits for its answer; what stays in host memory
does not wait. Replies need no such question: they lead to devices that our own map names.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from rpc.devices import DeviceMap
from rpc.errors import CallCancelledError, DeviceMapError
from rpc.runtime.executor import blocking
from rpc.runtime.signals import let_in, restore
from rpc.transports.base import Frame, FrameKind, Patience
from rpc.transports.tensorpipe.wire import Payload

if TYPE_CHECKING:
    from rpc.transports.tensorpipe.torch_agent import TorchAgent

_LOOK_SECONDS = 0.1
"""Seconds between two looks of a waiting thread whether its call is over."""


class Inquiry:
    """A question for a peer's devices.

    Attributes:
        problem: why they cannot be used, if they cannot.
        settled: set when it was answered, or is not waited for any more.
    """

    __slots__ = ("problem", "settled")

    def __init__(self) -> None:
        self.problem = ""
        self.settled = threading.Event()

    def wait(self, name: str, frame: Frame, patience: Callable[[int], Patience]) -> None:
        """Waits until it is settled.

        Args:
            name: the peer's.
            frame: what waits.
            patience: of a request, by its correlation.

        Raises:
            DeviceMapError: the devices cannot be used.
            CallCancelledError: the request's call ended meanwhile.
        """
        if not self.settled.is_set():
            with blocking():
                self._wait(name, frame, patience)
        if self.problem:
            raise DeviceMapError(f"worker {name!r} cannot take these tensors: {self.problem}")

    def _wait(self, name: str, frame: Frame, patience: Callable[[int], Patience]) -> None:
        while True:
            before = let_in()
            try:
                if self.settled.wait(_LOOK_SECONDS):
                    return
            finally:
                restore(before)
            is_request = frame.kind is FrameKind.REQUEST
            if is_request and patience(frame.correlation) is Patience.OVER:
                raise CallCancelledError(
                    f"the call ended while it waited for worker {name!r} to make its devices ready"
                )


class Readiness:
    """The answers of one peer about its devices.

    Attributes:
        is_settled: they are ready, or nobody waits for them any more.
    """

    __slots__ = ("_inquiry", "is_settled")

    def __init__(self) -> None:
        self._inquiry: Inquiry | None = None
        self.is_settled = False

    def ask(self) -> tuple[Inquiry, bool]:
        """Returns what to wait for, and whether the peer is still to be asked; not thread-safe.

        What was in the way once may have passed, so whoever comes after such an answer asks anew.
        """
        inquiry = self._inquiry
        if inquiry is not None:
            return inquiry, False
        inquiry = self._inquiry = Inquiry()
        if self.is_settled:
            inquiry.settled.set()
        return inquiry, True

    def answered(self, problem: str) -> None:
        """Notes what is in the way, as the peer has said, or that it need not be asked."""
        inquiry, self._inquiry = self._inquiry, None
        self.is_settled = self.is_settled or not problem
        if inquiry is not None:
            inquiry.problem = problem
            inquiry.settled.set()

    def close(self) -> None:
        """Asks the peer for nothing any more."""
        self.answered("")


def question(device_map: DeviceMap) -> Frame:
    """Returns the frame that asks a peer to make the devices ready that a map leads to."""
    names = sorted(str(device) for device in device_map.values())
    return Frame(FrameKind.NOTICE, 0, b"", " ".join(names).encode())


def make_ready(agent: TorchAgent, payload: Payload) -> str:
    """Does what a question asks; returns what is in the way, if something is."""
    try:
        agent.use([torch.device(name) for name in bytes(payload).decode().split()])
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
