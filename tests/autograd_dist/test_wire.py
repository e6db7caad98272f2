"""All that distributed autograd puts on the wire comes back as it was, or is refused."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autograd_dist.failure import Failure, LostWorker
from autograd_dist.passes import Ack, Gradients, PassId, Promise, Settle, Survey
from autograd_dist.sequels import SEQUEL_BYTES
from autograd_dist.wire import (
    AckMessage,
    CallMetadata,
    Inquiry,
    PassMessage,
    Release,
    decode_message,
    decode_release,
    encode_ack,
    encode_call,
    encode_request,
    spread,
)
from rpc.errors import FrameError

WIDE = st.integers(0, 2**64 - 1)
POSITIONS = st.lists(st.integers(0, 2**32 - 1), max_size=5).map(tuple)
PASS_IDS = st.builds(PassId, WIDE, st.integers(0, 2**32 - 1), WIDE)
REQUESTS = st.one_of(
    st.builds(Gradients, WIDE),
    st.builds(Survey, WIDE),
    st.builds(Settle, WIDE),
    st.builds(Promise, WIDE, WIDE, POSITIONS),
)


SEQUELS = st.just(b"") | st.binary(min_size=SEQUEL_BYTES, max_size=SEQUEL_BYTES)


@given(PASS_IDS, WIDE, REQUESTS, st.booleans(), st.lists(st.booleans()).map(tuple), SEQUELS)
def test_requests_survive_the_wire(pass_id, oldest, request, retain_graph, present, sequel):
    present = present if isinstance(request, Gradients) else ()
    message = PassMessage(pass_id, oldest, request, retain_graph, present, sequel)
    assert decode_message(encode_request(*message)) == message


def test_a_request_whose_sequel_is_cut_short_is_refused():
    whole = encode_request(PassId(1, 2, 3), 3, Settle(1), sequel=bytes(SEQUEL_BYTES))
    with pytest.raises(FrameError, match="sequel"):
        decode_message(whole[:-1])


@given(st.lists(WIDE, max_size=5).map(tuple))
def test_news_of_contexts_survives_the_wire(context_ids):
    for message in (Release(context_ids), Inquiry(context_ids)):
        assert decode_message(message.encode()) == message
    assert decode_release(Release(context_ids).encode()) == Release(context_ids)


def test_an_inquiry_is_answered_with_a_release():
    with pytest.raises(FrameError, match="answered with Inquiry"):
        decode_release(Inquiry((1,)).encode())


@given(st.lists(WIDE, min_size=1, max_size=5).map(tuple), st.integers(1, 40))
def test_a_release_that_lost_bytes_is_refused(context_ids, missing):
    with pytest.raises(FrameError):
        decode_message(Release(context_ids).encode()[:-missing])


@given(WIDE, WIDE, st.lists(st.integers(0, 9), max_size=5).map(tuple), st.booleans())
def test_call_metadata_survives_the_wire(context_id, message_id, positions, grad_enabled):
    metadata = CallMetadata(context_id, message_id, positions, grad_enabled)
    assert CallMetadata.decode(encode_call(*metadata), 10) == metadata
    assert CallMetadata.context_of(encode_call(*metadata)) == context_id


LOST = st.builds(LostWorker, st.text(min_size=1), WIDE, st.text())
FAILURE = st.builds(Failure, st.text(), LOST | st.none())


NUMBERS = st.integers(0, 2**32 - 1)


@given(st.integers(-(2**31), 2**31 - 1), NUMBERS, FAILURE | st.none(), NUMBERS)
def test_acknowledgements_survive_the_wire(stuck, resolved, error, stepped):
    message = AckMessage(Ack(stuck, resolved, error, stepped))
    assert AckMessage.decode(encode_ack(*message)) == message


@given(st.integers(-(2**31), 2**31 - 1), WIDE, st.lists(st.booleans(), max_size=5).map(tuple))
def test_acknowledgements_with_gradients_survive_the_wire(stuck, message_id, present):
    message = AckMessage(Ack(stuck, 3, None, 2), message_id, present)
    assert AckMessage.decode(encode_ack(*message)) == message


def test_what_cannot_be_encoded_of_an_error_is_escaped():
    message = AckMessage(Ack(error=Failure("no file \udc80")))
    assert AckMessage.decode(encode_ack(*message)).ack.error == Failure(r"no file \udc80")


@pytest.mark.parametrize("missing", [1, 5, 20, 25])
def test_an_acknowledgement_whose_error_is_cut_short_is_refused(missing):
    whole = encode_ack(Ack(error=Failure("", LostWorker("bob", 1, "gone"))))
    with pytest.raises(FrameError, match="acknowledgement"):
        AckMessage.decode(whole[:-missing])


@pytest.mark.parametrize("missing", [1, 8, 9])
def test_an_acknowledgement_whose_message_is_cut_short_is_refused(missing):
    whole = encode_ack(Ack(), 7, ())
    with pytest.raises(FrameError, match="acknowledgement"):
        AckMessage.decode(whole[:-missing])


@pytest.mark.parametrize("data", [b"\3" + bytes(12), bytes(14)])
def test_an_acknowledgement_of_no_known_kind_or_with_bytes_to_spare_is_refused(data):
    with pytest.raises(FrameError, match="acknowledgement"):
        AckMessage.decode(data)


@given(st.binary(max_size=80))
def test_damaged_bytes_are_refused_and_never_crash(data):
    for decode in (decode_message, AckMessage.decode, lambda d: CallMetadata.decode(d, 3)):
        with contextlib.suppress(FrameError):
            decode(data)


def test_metadata_that_names_a_missing_tensor_is_refused():
    data = encode_call(1, 1, (3,))
    with pytest.raises(FrameError, match="names more than 3 tensors"):
        CallMetadata.decode(data, 3)


def test_gradients_are_put_back_at_their_places():
    a, b = torch.ones(1), torch.ones(2)
    assert spread([True, False, True], [a, b]) == [a, None, b]
    with pytest.raises(FrameError, match="1 gradients came where 2 were announced"):
        spread([True, True], [a])
