"""Headers as bytes: what goes in comes out, and what is no header is refused as such."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.errors import EncodeError, FrameError
from rpc.wire.messages import PROTOCOL_VERSION, Operation, Reply, Request, Status

# The layouts that the module's docstring describes, spelled out once more.
REQUEST_HEAD = "<BBBBdHHI"
REPLY_HEAD = "<BBBBI"

extensions = st.lists(
    st.tuples(st.text(max_size=60).filter(lambda t: t.isprintable()), st.binary(max_size=40)),
    max_size=4,
).map(tuple)
sections = st.binary(max_size=50)
requests = st.builds(
    Request,
    operation=st.sampled_from(Operation),
    plain=st.booleans(),
    timeout=st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    target=sections,
    extensions=extensions,
    references=sections,
    tensor_table=sections,
    function=sections,
)
replies = st.builds(
    Reply,
    status=st.sampled_from(Status),
    plain=st.booleans(),
    extensions=extensions,
    references=sections,
    tensor_table=sections,
)
messages = requests | replies


@given(messages)
def test_what_is_encoded_is_decoded(message: Request | Reply):
    assert type(message).decode(message.encode()) == message


def test_a_plain_call_is_20_bytes_and_a_plain_reply_8():
    assert Request(Operation.CALL).encode() == struct.pack(
        REQUEST_HEAD, PROTOCOL_VERSION, 1, 1, 0, 0.0, 0, 0, 0
    )
    assert Reply(Status.OK).encode() == struct.pack(REPLY_HEAD, PROTOCOL_VERSION, 0, 1, 0, 0)


def test_the_sections_of_a_request_follow_its_head_in_order():
    request = Request(
        Operation.CREATE,
        plain=False,
        timeout=1.5,
        target=b"target",
        extensions=(("a.b", b"meta"),),
        references=b"references",
        tensor_table=b"table",
        function=b"f",
    )
    head = struct.pack(REQUEST_HEAD, PROTOCOL_VERSION, 2, 0, 1, 1.5, 1, 6, 10)
    extension = struct.pack("<BI", 3, 4) + b"a.b" + b"meta"
    assert request.encode() == head + b"f" + b"target" + extension + b"references" + b"table"


def test_the_sections_of_a_reply_follow_its_head_in_order():
    reply = Reply(Status.ERROR, False, (("a", b""), ("b", b"x")), b"references", b"table")
    head = struct.pack(REPLY_HEAD, PROTOCOL_VERSION, 1, 0, 2, 10)
    packed = struct.pack("<BI", 1, 0) + b"a" + struct.pack("<BI", 1, 1) + b"b" + b"x"
    assert reply.encode() == head + packed + b"references" + b"table"


# --- Bytes that are no message


@given(st.binary(max_size=120))
def test_arbitrary_bytes_are_a_message_or_a_frame_error(data: bytes):
    for kind in (Request, Reply):
        try:
            message = kind.decode(data)
        except FrameError:
            continue
        assert kind.decode(message.encode()) == message


@given(messages, st.data())
def test_damaged_messages_are_a_message_or_a_frame_error(
    message: Request | Reply, data: st.DataObject
):
    damaged = bytearray(message.encode())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = type(message).decode(bytes(damaged))
    except FrameError:
        return
    assert type(message).decode(found.encode()) == found


@given(messages)
def test_a_message_that_ends_early_is_refused_unless_only_its_table_is_shorter(
    message: Request | Reply,
):
    data = message.encode()
    without_table = len(data) - len(message.tensor_table)
    for end in range(len(data)):
        if end < without_table:
            with pytest.raises(FrameError):
                type(message).decode(data[:end])
        else:
            found = type(message).decode(data[:end])
            assert found.tensor_table == message.tensor_table[: end - without_table]


@pytest.mark.parametrize("kind", [Request, Reply])
def test_nothing_is_no_message(kind: type[Request] | type[Reply]):
    with pytest.raises(FrameError, match="of 0 bytes is too short") as refused:
        kind.decode(b"")
    assert refused.value.__suppress_context__


@pytest.mark.parametrize(
    ("message", "at", "value", "says"),
    [
        (Request(Operation.CALL), 0, 9, "message of protocol version 9; this worker speaks 1"),
        (Reply(Status.OK), 0, 0, "message of protocol version 0; this worker speaks 1"),
        (Request(Operation.CALL), 1, 77, "unknown operation 77"),
        (Reply(Status.OK), 1, 2, "unknown reply status 2"),
        (Request(Operation.CALL), 3, 1, "an extension runs past the end"),
        (Request(Operation.CALL, extensions=(("é", b""),)), 25, 0xFF, "not UTF-8"),
    ],
)
def test_a_refusal_says_what_is_wrong(message: Request | Reply, at: int, value: int, says: str):
    data = bytearray(message.encode())
    data[at] = value
    with pytest.raises(FrameError, match=says):
        type(message).decode(bytes(data))


@pytest.mark.parametrize("timeout", [-1.0, float("inf"), float("nan")])
def test_a_time_that_cannot_be_left_is_refused(timeout: float):
    data = Request(Operation.CALL, timeout=timeout).encode()
    with pytest.raises(FrameError, match="seconds left"):
        Request.decode(data)


# --- Limits


def test_the_largest_parts_fit():
    many = tuple((f"e{n}", b"") for n in range(255))
    request = Request(
        Operation.EXTENSION, target=b"t" * 65535, extensions=many, function=b"f" * 65535
    )
    assert Request.decode(request.encode()) == request
    named = Reply(Status.OK, extensions=(("n" * 255, b"x" * 100_000),), references=b"r" * 100_000)
    assert Reply.decode(named.encode()) == named


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (Request(Operation.CALL, target=b"t" * 65536), "0 and 65536 bytes"),
        (Request(Operation.CALL, function=b"f" * 65536), "65536 and 0 bytes"),
        (Request(Operation.CALL, extensions=(("e", b""),) * 256), "256 extensions"),
        (Reply(Status.OK, extensions=(("e", b""),) * 256), "this one has 256"),
        (Reply(Status.OK, extensions=(("n" * 256, b""),)), "at most 255 bytes, unlike 'nnn"),
        (Request(Operation.CALL, extensions=(("é" * 128, b""),)), "at most 255 bytes"),
    ],
)
def test_what_is_too_large_for_the_layout_is_an_error_that_says_so(
    message: Request | Reply, says: str
):
    with pytest.raises(EncodeError, match=says):
        message.encode()
