"""Control messages survive the wire, and nothing else does."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpc.errors import FrameError
from rpc.ids import GlobalId, Life, Reference
from rpc.wire import control
from rpc.wire.control import (
    Accepted,
    ControlMessage,
    Delete,
    DuplicateFilter,
    Passage,
    Passed,
    Registered,
    Rejected,
    decode_batch,
    decode_passed,
    encode_batch,
    encode_passed,
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
IDS = st.builds(GlobalId, U32, U64, U64)
REFERENCES = st.builds(Reference, IDS, st.builds(Life, U32, U64), U64)
VALUES = {
    control.GLOBAL_ID: IDS,
    control.REFERENCE: REFERENCES,
    control.TEXT: st.text("a \0é\u20ac\U0001f40d", max_size=50),
    control.NUMBER: U64,
    control.NUMBERS: st.lists(U64, max_size=4).map(tuple),
}
MESSAGES = st.one_of(
    st.builds(layout.message, *(VALUES[field] for field in layout.fields))
    for layout in control._LAYOUTS
)
PASSED = st.builds(Passed, REFERENCES, IDS, st.sampled_from(Passage))

FORK = GlobalId(1, 2, 3)

untimed = settings(deadline=None)


# --- Batches ------------------------------------------------------------------


@untimed
@given(U64, st.lists(MESSAGES, max_size=5))
def test_any_batch_arrives_as_it_was_sent(sequence: int, messages: list[ControlMessage]) -> None:
    assert decode_batch(encode_batch(sequence, messages)) == (sequence, messages)


def test_layout_on_the_wire_stays_what_it_is() -> None:
    fork = "01000000" + "0200000000000000" + "0300000000000000"
    head = "01" + "0700000000000000" + "02000000"
    expected = bytes.fromhex(head + "02" + fork + "03" + fork + "0400" + b"gone".hex())
    assert encode_batch(7, [Registered(FORK), Rejected(FORK, "gone")]) == expected


def test_every_message_has_a_code_of_its_own() -> None:
    defined = [value for value in vars(control).values() if isinstance(value, type)]
    messages = {value for value in defined if issubclass(value, ControlMessage)}
    known = {layout.message for layout in control._LAYOUTS}
    assert known == messages - {ControlMessage}
    assert len({layout.code for layout in control._LAYOUTS}) == len(known)


def test_batch_is_compact() -> None:
    reference = Reference(FORK, Life(0, 0), 0)
    assert len(encode_batch(0, [Accepted(FORK)] * 10)) == 13 + 10 * 21
    assert len(encode_batch(0, [Delete(reference, FORK)])) == 13 + 61


@pytest.mark.parametrize("character", ["x", "é", "\U0001f40d"])
def test_reason_too_long_for_the_wire_is_cut_between_characters(character: str) -> None:
    _, [message] = decode_batch(encode_batch(0, [Rejected(FORK, character * 70_000)]))
    assert isinstance(message, Rejected)
    assert set(message.reason) == {character}
    assert 65_530 <= len(message.reason.encode()) <= 65_535


def test_reason_that_is_not_unicode_still_arrives() -> None:
    _, messages = decode_batch(encode_batch(0, [Rejected(FORK, "bad \udc80 name")]))
    assert messages == [Rejected(FORK, "bad ? name")]


@untimed
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_or_read_but_nothing_else(data: bytes) -> None:
    for decode in (decode_batch, decode_passed):
        with contextlib.suppress(FrameError):
            decode(data)


@untimed
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_truncated_batch_is_refused(messages: list[ControlMessage], data: st.DataObject) -> None:
    whole = encode_batch(1, messages)
    with pytest.raises(FrameError):
        decode_batch(whole[: data.draw(st.integers(0, len(whole) - 1))])


@untimed
@given(st.lists(MESSAGES, max_size=3), st.binary(min_size=1, max_size=9))
def test_stray_bytes_are_refused(messages: list[ControlMessage], stray: bytes) -> None:
    with pytest.raises(FrameError):
        decode_batch(encode_batch(1, messages) + stray)


@untimed
@given(st.lists(MESSAGES, min_size=1, max_size=3), st.data())
def test_flipped_bits_are_refused_or_read_but_nothing_else(
    messages: list[ControlMessage], data: st.DataObject
) -> None:
    damaged = bytearray(encode_batch(1, messages))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with contextlib.suppress(FrameError):
        decode_batch(damaged)


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"", "ends at byte 0"),
        (b"\x02" + bytes(12), "version 2"),
        (b"\x01" + bytes(8) + b"\x01\0\0\0\xff", "code 255"),
        (b"\x01" + bytes(8) + b"\xff\xff\xff\xff", "ends at byte 13"),
        (b"\x01" + bytes(8) + b"\x01\0\0\0\x03" + bytes(20) + b"\x01\0\xff", "UTF-8"),
        (b"\x01" + bytes(12) + b"!", "1 stray bytes"),
    ],
)
def test_malformed_batch_is_refused_with_the_reason(data: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decode_batch(data)


# --- Tables of references -----------------------------------------------------


@untimed
@given(st.lists(PASSED, max_size=4))
def test_any_table_of_references_arrives_as_it_was_sent(table: list[Passed]) -> None:
    assert decode_passed(encode_passed(table)) == table


def test_empty_table_of_references_takes_no_bytes() -> None:
    assert encode_passed([]) == b""


@pytest.mark.parametrize("view", [bytes, bytearray, memoryview])
def test_any_kind_of_buffer_is_read(view: type) -> None:
    passed = Passed(Reference(FORK, Life(1, 1), 5), FORK, Passage.CHILD)
    assert decode_passed(view(encode_passed([passed]))) == [passed]
    assert decode_batch(view(encode_batch(3, [Accepted(FORK)]))) == (3, [Accepted(FORK)])


@pytest.mark.parametrize(
    ("data", "complaint"), [(bytes(60), "60 bytes long"), (bytes(61), "unknown passage 0")]
)
def test_malformed_table_is_refused_with_the_reason(data: bytes, complaint: str) -> None:
    with pytest.raises(FrameError, match=complaint):
        decode_passed(data)


# --- Duplicates ---------------------------------------------------------------


@untimed
@given(st.lists(st.integers(0, 30), max_size=80))
def test_number_is_accepted_the_first_time_only(numbers: list[int]) -> None:
    seen: set[int] = set()
    filtered = DuplicateFilter()
    for number in numbers:
        assert (number in filtered) == (number in seen)
        assert filtered.accept(number) == (number not in seen)
        seen.add(number)
        runs = sum(before - 1 not in seen for before in seen)
        assert filtered.ranges == runs


def test_memory_does_not_grow_when_every_number_comes_in_the_end() -> None:
    numbers = list(range(1000))
    random.Random(3).shuffle(numbers)
    filtered = DuplicateFilter()
    assert all(filtered.accept(number) for number in numbers)
    assert filtered.ranges == 1


def test_far_number_costs_one_range() -> None:
    filtered = DuplicateFilter()
    assert filtered.accept(2**64 - 1)
    assert filtered.accept(0)
    assert filtered.ranges == 2
