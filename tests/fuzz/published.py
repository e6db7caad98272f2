"""Bytes that strangers and readers send a publisher of versions, and that others send a reader."""

from __future__ import annotations

import contextlib
import random
import socket

import pytest

from tensorwire.checkpoint.chain import Place
from tensorwire.checkpoint.errors import CheckpointError
from tensorwire.checkpoint.remote import messages
from tensorwire.checkpoint.remote.client import PublishedChain
from tensorwire.checkpoint.remote.handshake import (
    HELLO_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    HandshakeError,
    PublisherSide,
    ReaderSide,
)
from tests.fuzz.mutations import changed

_KEY, _NOT_THE_KEY = b"the reader key", b"a guess"
_READ = messages.Read(7, "xxh3_128:" + "a" * 32, "shard-0.safetensors", 1 << 20)
_WAY = messages.Way(Place(7, "b" * 32, "xxh3_128:" + "a" * 32))


def reader_handshake(draw: random.Random) -> None:
    """A stranger knocks at a publisher, or pretends to a reader to be one."""
    side, stranger = PublisherSide(_KEY, b"p" * NONCE_BYTES), ReaderSide(_NOT_THE_KEY, b"s" * 32)
    honest = ReaderSide(_KEY, b"h" * NONCE_BYTES)
    past = PublisherSide(_KEY, b"o" * NONCE_BYTES)
    proof = honest.prove(past.answer(honest.hello()))
    verdict = past.verdict(proof)  # the stranger has heard all of an honest conversation
    hello = stranger.hello() if draw.random() < 0.5 else changed(draw, [stranger.hello()])
    with contextlib.suppress(HandshakeError):
        guess = stranger.prove(side.answer(hello))
        with pytest.raises(HandshakeError):
            side.verdict(changed(draw, [guess, proof])[:PROOF_BYTES])
        with pytest.raises(HandshakeError):
            side.verdict(proof)
    reader = ReaderSide(_KEY, b"r" * NONCE_BYTES)
    with contextlib.suppress(HandshakeError):
        reader.prove(changed(draw, [past.answer(honest.hello())])[:HELLO_BYTES])
    with pytest.raises(HandshakeError):
        reader.check(draw.choice([verdict, changed(draw, [verdict])]))


def reader_requests(draw: random.Random) -> None:
    """A reader, which has the key, asks for what cannot be."""
    data = changed(draw, [messages.encoded(_READ), messages.encoded(_WAY)])
    head, body = data[: messages.REQUEST_HEAD.size], data[messages.REQUEST_HEAD.size :]
    if len(head) < messages.REQUEST_HEAD.size:
        return
    with contextlib.suppress(messages.MessageError):
        length = messages.request_length(head)
        assert length <= messages.MOST_REQUEST
        request = messages.decoded(head, body[:length])
        assert isinstance(request, messages.Read | messages.Way)


def publisher_replies(draw: random.Random) -> None:
    """A publisher, which has the key, says what cannot be."""
    ours, theirs = socket.socketpair()
    chain = PublishedChain("tensorwire://localhost:1", _KEY)
    chain._socket = ours
    told = messages.reply_head(messages.Reply.VERSION, 9) + b'{"a": 12}'
    end = messages.reply_head(messages.Reply.END, 0)
    wrong = messages.error_reply(messages.Problem.GONE, "no \N{SNOWMAN}")
    with theirs:
        theirs.sendall(changed(draw, [told + end, told + told + end, wrong, end]))
        theirs.shutdown(socket.SHUT_WR)
        with contextlib.suppress(CheckpointError):
            assert all(isinstance(each, bytes) for each in chain.way(None))
    chain.close()
