"""Values become messages and values again; what was not taken in fails its call alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rpc.agent import Agent
from rpc.errors import DecodeError
from rpc.ids import Life
from rpc.testing import local_group
from rpc.transports.base import Frame, FrameKind, Unreceived

WHY = "a message of 9 bytes from worker 'x' could not be taken in: no memory"


def fail() -> None:
    raise ValueError("the handler's own")


def take_in_no_more(agent: Agent, kind: FrameKind, patched: pytest.MonkeyPatch) -> None:
    """From now on the agent's transport has no memory for such frames."""
    deliver: Callable[..., None] = agent.inbound.deliver

    def deliver_without(sender: Life, frame: Frame, *rest: Any) -> None:
        if frame.kind is kind:
            frame = frame._replace(payload=Unreceived(WHY.encode()), tensors=())
        deliver(sender, frame, *rest)

    patched.setattr(agent.inbound, "deliver", deliver_without)


def test_a_request_that_was_not_taken_in_fails_where_it_was_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_group("here", "there") as (here, there):
        with monkeypatch.context() as patched:
            take_in_no_more(there, FrameKind.REQUEST, patched)
            with pytest.raises(DecodeError, match=WHY):
                here.rpc_sync("there", abs, (-1,))
            made = here.remote("there", abs, (-1,))
            with pytest.raises(DecodeError, match=WHY):
                made.to_here()
        assert here.rpc_sync("there", abs, (-1,)) == 1


def test_a_reply_that_was_not_taken_in_fails_where_it_was_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with local_group("here", "there") as (here, _):
        with monkeypatch.context() as patched:
            take_in_no_more(here, FrameKind.REPLY, patched)
            for function in (list, fail):
                with pytest.raises(DecodeError, match=WHY):
                    here.rpc_sync("there", function)
                with pytest.raises(DecodeError, match=WHY):
                    here.rpc_async("there", function).wait()
        assert here.rpc_sync("there", abs, (-1,)) == 1
