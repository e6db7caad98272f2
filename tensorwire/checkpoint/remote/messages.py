"""Requests of readers to a publisher, and its replies, as bytes. Sans-IO.

A request is a kind, a length of at most :data:`MOST_REQUEST`, and a body. A reply is a kind, a
length and a body, of which only that of a file is longer than its reader has room for.

``WAY`` asks which versions to apply after the one that the reader has: a ``VERSION`` for each, with
the text of its ``version.json``, then ``END``. ``READ`` asks for a file of a version from an offset
on: ``FILE``, whose body is the rest of the file. Either may be answered by an ``ERROR``.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass
from typing import Final

from tensorwire.checkpoint.bounded import MANIFEST_BYTES
from tensorwire.checkpoint.chain import Place

REQUEST_HEAD: Final = struct.Struct("<BH")
REPLY_HEAD: Final = struct.Struct("<BQ")
MOST_REQUEST: Final = 512
MOST_TEXT: Final = 2048
"""Bytes of an error's text."""
_WAY: Final = struct.Struct("<Q32s")
_READ: Final = struct.Struct("<QQB")


class MessageError(Exception):
    """The other end, which has proven the key, says what cannot be."""


class Ask(enum.IntEnum):
    """The kinds of requests."""

    WAY = 1
    READ = 2


class Reply(enum.IntEnum):
    """The kinds of replies."""

    VERSION = 1
    END = 2
    FILE = 3
    ERROR = 4


class Problem(enum.IntEnum):
    """The kinds of errors."""

    DAMAGED = 1
    """A version is damaged or missing."""
    MISMATCH = 2
    """The chain is another one than the one that the reader follows."""
    NOTHING = 3
    """There is no folder yet."""
    GONE = 4
    """The version was removed."""
    OTHER = 5
    """The folder cannot be read."""


@dataclass(frozen=True, slots=True)
class Way:
    """Asks for the versions after one.

    Args:
        after: what the reader has; None for nothing.
    """

    after: Place | None


@dataclass(frozen=True, slots=True)
class Read:
    """Asks for a file.

    Args:
        number: of the version.
        checksum: of its ``version.json``.
        name: of the file.
        offset: the first byte that is wanted.
    """

    number: int
    checksum: str
    name: str
    offset: int


def encoded(request: Way | Read) -> bytes:
    """A request as bytes."""
    if isinstance(request, Way):
        after, kind = request.after, Ask.WAY
        body = b""
        if after is not None:
            body = _WAY.pack(after.number, after.chain.encode()) + after.checksum.encode()
    else:
        kind, checksum = Ask.READ, request.checksum.encode()
        body = _READ.pack(request.number, request.offset, len(checksum)) + checksum
        body += request.name.encode()
    return REQUEST_HEAD.pack(kind, len(body)) + body


def request_length(head: bytes) -> int:
    """The length of the body of a request.

    Raises:
        MessageError: there is no such request.
    """
    kind, length = REQUEST_HEAD.unpack(head)
    if kind not in Ask.__members__.values() or length > MOST_REQUEST:
        raise MessageError(f"request {kind} of {length} bytes")
    return int(length)


def decoded(head: bytes, body: bytes) -> Way | Read:
    """The request that these bytes stand for.

    Raises:
        MessageError: they stand for none.
    """
    kind, _ = REQUEST_HEAD.unpack(head)
    try:
        if kind == Ask.WAY:
            if not body:
                return Way(None)
            number, chain = _WAY.unpack_from(body)
            return Way(Place(number, chain.decode("ascii"), body[_WAY.size :].decode("ascii")))
        number, offset, length = _READ.unpack_from(body)
        rest = body[_READ.size :]
        return Read(number, rest[:length].decode("ascii"), rest[length:].decode(), offset)
    except (struct.error, UnicodeDecodeError) as error:
        raise MessageError(f"request {kind} of {len(body)} bytes: {error}") from None


def reply_head(kind: Reply, length: int) -> bytes:
    """The bytes before the body of a reply."""
    return REPLY_HEAD.pack(kind, length)


def error_reply(problem: Problem, text: str) -> bytes:
    """A reply that says what is wrong."""
    body = bytes([problem]) + text.encode()[:MOST_TEXT]
    return reply_head(Reply.ERROR, len(body)) + body


def parsed_head(head: bytes) -> tuple[Reply, int]:
    """The kind of a reply and the length of its body.

    Raises:
        MessageError: there is no such reply.
    """
    kind, length = REPLY_HEAD.unpack(head)
    most = {Reply.VERSION: MANIFEST_BYTES, Reply.END: 0, Reply.ERROR: 1 + MOST_TEXT}
    if kind not in Reply.__members__.values() or length > most.get(kind, length):
        raise MessageError(f"reply {kind} of {length} bytes")
    return Reply(kind), length


def parsed_error(body: bytes) -> tuple[Problem, str]:
    """Reads an ``ERROR``.

    Raises:
        MessageError: it says nothing.
    """
    if not body or body[0] not in Problem.__members__.values():
        raise MessageError(f"an error of {len(body)} bytes that is none")
    return Problem(body[0]), body[1:].decode(errors="replace")
