"""Messages of a step are pickled without a look at each field by Python, and come as they were."""

from __future__ import annotations

import sys
from types import FrameType

import pytest
import torch

from rpc.wire import codec
from tensorwire.parameter_server.decisions.pushes import Push
from tensorwire.parameter_server.decisions.reads import Pull
from tensorwire.parameter_server.messaging.messages import (
    Accepted,
    Ask,
    Exchange,
    Load,
    PullReply,
    TableIds,
    TablePush,
)

_IDS = TableIds(("users", "items"), (2, 1), torch.tensor([3, 5, 4]))
_PUSH = Push(1, 7, 2, load=Load((TablePush(_IDS, (torch.ones(3, 4),), ((0.5,),), 6),)))
_STEP = Exchange("cluster", 0, _PUSH, Pull(7, 2, Ask(1, "trainer", 8, (_IDS,))))
_ANSWER = PullReply(((torch.ones(3, 4),),), {}, 7, 6, 1, changed=())


@pytest.mark.parametrize("message", [_STEP, _ANSWER, Accepted(1, 2), Exchange("", 1, None, None)])
def test_messages_come_as_they_were(message: object) -> None:
    sent = codec.encode(message)
    came = codec.decode(sent.payload, sent.tensors, sent.references)
    assert type(came) is type(message)
    assert repr(came) == repr(message)


def test_no_function_looks_at_the_fields_of_a_step() -> None:
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            files.append(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        sent = codec.encode(_STEP)
        codec.decode(sent.payload, sent.tensors, sent.references)
    finally:
        sys.setprofile(before)
    assert any(file.endswith("pickled.py") for file in files)
    assert not any(file.endswith("dataclasses.py") for file in files)


def test_a_record_is_pickled_with_all_its_fields() -> None:
    assert _PUSH.__reduce__() == (Push, (1, 7, 2, _PUSH.kind, _PUSH.load, None))
