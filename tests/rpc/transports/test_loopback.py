"""Frames of a worker to itself."""

from __future__ import annotations

import logging
import threading
import time

import pytest
import torch

from rpc.transports.base import Frame, FrameKind
from rpc.transports.loopback import Loopback

SECONDS = 30.0


def notice(number: int, *tensors: torch.Tensor) -> Frame:
    return Frame(FrameKind.NOTICE, number, b"", tensors=tensors)


def soon() -> float:
    return time.monotonic() + SECONDS


def test_frames_arrive_in_order_on_a_thread_of_their_own() -> None:
    arrived: list[int] = []
    threads: set[str] = set()

    def take(frame: Frame) -> None:
        arrived.append(frame.correlation)
        threads.add(threading.current_thread().name)

    loopback = Loopback("mine", take)
    assert all(loopback.send(notice(number)) for number in range(100))
    loopback.close(soon())
    assert arrived == list(range(100))
    assert threads == {"mine"}


def test_what_arrives_is_a_copy() -> None:
    arrived: list[Frame] = []
    loopback = Loopback("mine", arrived.append)
    tensor, payload = torch.zeros(3, 4).t().requires_grad_(), bytearray(b"abc")
    loopback.send(Frame(FrameKind.NOTICE, 1, b"", payload, (tensor.detach(),)))
    with torch.no_grad():
        tensor += 1
    payload[0] = 0
    loopback.close(soon())
    (frame,) = arrived
    assert bytes(frame.payload) == b"abc"
    assert frame.tensors[0].stride() == tensor.stride()
    assert not frame.tensors[0].any()


def test_nothing_is_taken_once_it_is_closed() -> None:
    arrived: list[Frame] = []
    loopback = Loopback("mine", arrived.append)
    loopback.close(soon())
    assert not loopback.send(notice(1))
    assert arrived == []


def test_who_takes_a_frame_may_send_another() -> None:
    arrived: list[int] = []
    both = threading.Event()

    def take(frame: Frame) -> None:
        assert loopback.is_here()
        arrived.append(frame.correlation)
        if frame.correlation:
            both.set()
        else:
            loopback.send(notice(1))

    loopback = Loopback("mine", take)
    loopback.send(notice(0))
    assert both.wait(SECONDS)
    assert not loopback.is_here()
    loopback.close(soon())
    assert arrived == [0, 1]


def test_a_frame_that_cannot_be_taken_keeps_none_from_coming(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arrived: list[int] = []

    def take(frame: Frame) -> None:
        if not frame.correlation:
            raise KeyError("not this one")
        arrived.append(frame.correlation)

    loopback = Loopback("mine", take)
    with caplog.at_level(logging.ERROR):
        loopback.send(notice(0))
        loopback.send(notice(1))
        loopback.close(soon())
    assert arrived == [1]
    assert "mine could not deliver a frame" in caplog.text


def test_closing_waits_no_longer_than_it_may() -> None:
    begun, end = threading.Event(), threading.Event()

    def take(_: Frame) -> None:
        begun.set()
        end.wait(SECONDS)

    loopback = Loopback("mine", take)
    loopback.send(notice(1))
    assert begun.wait(SECONDS)
    loopback.close(time.monotonic())
    end.set()
    loopback.close(soon())
