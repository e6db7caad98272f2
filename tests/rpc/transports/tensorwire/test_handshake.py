"""The handshake: the right worker is accepted, anything else is refused by name."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpc.transports.tensorwire.handshake import (
    Acceptor,
    ChannelKind,
    HandshakeError,
    Hello,
    Identity,
    Initiator,
    RefusedError,
    derive_key,
)

ONE = Identity(0, 4)
OTHER = Identity(1, 7)
HELLO = Hello(ChannelKind.MAIN, ONE, OTHER, b"t" * 16, b"i" * 32)
KEY = derive_key(b"group", b"listener")


def acceptor(key: bytes = KEY, identity: Identity = OTHER) -> Acceptor:
    return Acceptor(key, identity, b"a" * 32)


def feed(side: Initiator | Acceptor, data: bytes, step: int = 1000) -> bytes:
    """Gives a side ``data``, never more than it asks for; returns what it says to that."""
    answer = b""
    while data:
        count = min(side.wanted, step)
        answer += side.receive(data[:count])
        data = data[count:]
    return answer


def converse(initiator: Initiator, other: Acceptor, step: int = 1000) -> None:
    challenge = feed(other, initiator.begin(), step)
    assert feed(other, feed(initiator, challenge, step), step) == b""


@given(st.integers(1, 100), st.sampled_from(ChannelKind))
def test_two_that_hold_the_key_agree_however_the_bytes_are_cut(
    step: int, kind: ChannelKind
) -> None:
    hello = replace(HELLO, kind=kind)
    initiator, other = Initiator(KEY, hello), acceptor()
    converse(initiator, other, step)
    assert other.authenticated == hello
    assert not initiator.accepted
    assert feed(initiator, other.accept(), step) == b""
    assert initiator.accepted


def test_the_key_depends_on_group_and_listener() -> None:
    assert hmac.new(b"group", b"tensorwire listenerlistener", hashlib.sha256).digest() == KEY
    assert len({KEY, derive_key(b"other", b"listener"), derive_key(b"group", b"other")}) == 3


def test_an_initiator_notices_an_acceptor_without_the_key() -> None:
    initiator, other = Initiator(KEY, HELLO), acceptor(key=b"wrong")
    challenge = feed(other, initiator.begin())
    with pytest.raises(HandshakeError, match="acceptor does not hold the group's key"):
        feed(initiator, challenge)


def test_an_acceptor_notices_an_initiator_without_the_key() -> None:
    wrong, right = Initiator(b"wrong", HELLO), Initiator(KEY, HELLO)
    feed(right, feed(acceptor(), right.begin()))
    other = acceptor()
    feed(other, wrong.begin())
    forged = feed(wrong, feed(acceptor(key=b"wrong"), wrong.begin()))
    with pytest.raises(HandshakeError, match="initiator does not hold the group's key"):
        feed(other, forged)
    assert other.authenticated is None


def test_a_proof_cannot_be_replayed() -> None:
    initiator = Initiator(KEY, HELLO)
    first = acceptor()
    proof = feed(initiator, feed(first, initiator.begin()))
    second = Acceptor(KEY, OTHER, b"b" * 32)
    feed(second, initiator.begin())
    with pytest.raises(HandshakeError, match="key"):
        feed(second, proof)


def test_a_challenge_cannot_be_reflected_as_a_proof() -> None:
    other = acceptor()
    challenge = feed(other, Initiator(KEY, HELLO).begin())
    proof = challenge[:6] + (32).to_bytes(2, "little") + challenge[8 + 32 :]
    with pytest.raises(HandshakeError):
        feed(other, proof[:5] + b"\x03" + proof[6:])


@pytest.mark.parametrize("identity", [Identity(2, 7), Identity(1, 8)])
def test_a_worker_that_was_not_meant_says_so_but_not_who_it_is(identity: Identity) -> None:
    with pytest.raises(HandshakeError, match="not the worker that the initiator looks for") as told:
        feed(acceptor(identity=identity), Initiator(KEY, HELLO).begin())
    assert not set("0123456789") & set(str(told.value))


def test_a_refusal_carries_its_reason() -> None:
    initiator, other = Initiator(KEY, HELLO), acceptor()
    converse(initiator, other)
    with pytest.raises(RefusedError, match="refused: history"):
        feed(initiator, other.reject("history"))


def test_a_refusal_of_somebody_without_the_key_is_not_taken_for_a_workers() -> None:
    with pytest.raises(HandshakeError, match="refused: history") as told:
        feed(Initiator(KEY, HELLO), Acceptor.reject("history"))
    assert not isinstance(told.value, RefusedError)


def test_being_accepted_without_a_challenge_is_refused() -> None:
    with pytest.raises(HandshakeError, match="unexpected ACCEPT"):
        feed(Initiator(KEY, HELLO), Acceptor.accept())


def test_another_version_is_refused_by_its_number() -> None:
    data = bytearray(Initiator(KEY, HELLO).begin())
    data[4] = 9
    with pytest.raises(HandshakeError, match="version 9"):
        feed(acceptor(), bytes(data))


@given(st.binary(min_size=8, max_size=600))
def test_random_bytes_are_refused_at_once(data: bytes) -> None:
    for side in (acceptor(), Initiator(KEY, HELLO)):
        with pytest.raises(HandshakeError):
            feed(side, data)


@given(st.integers(0, 8 * 105 - 1))
def test_a_flipped_bit_never_ends_in_a_wrong_identity(bit: int) -> None:
    data = bytearray(Initiator(KEY, HELLO).begin())
    assert len(data) == 105
    data[bit // 8] ^= 1 << bit % 8
    initiator, other = Initiator(KEY, HELLO), acceptor()
    try:
        answer = feed(other, bytes(data))
        if answer:
            feed(other, feed(initiator, answer))
    except HandshakeError:
        pass
    assert other.authenticated is None
