"""The header of every message: what it asks for and what rides along, in bytes.

Owns the binary layout and nothing else: values are the codec's (they travel as
payload), reference entries and control messages are packed by ``control``, the
tensor table by ``tensor_table``. Nothing here is ever pickled, and malformed
bytes raise :class:`FrameError`.

Layout, little endian. Request: ``version u8, operation u8, flags u8,
extension count u8, remaining seconds f64 (0 = no deadline), function length u16,
target length u16, references length u32``, then function, target, extensions,
references; the rest is the tensor table. Reply: ``version u8, status u8,
flags u8, extension count u8, references length u32``, then extensions,
references and table. An extension is ``name length u8, data length u32, name,
data``.
"""

from __future__ import annotations

import enum
import functools
import math
import struct
from typing import Final, NamedTuple

from rpc.errors import EncodeError, FrameError, caused
from rpc.ids import new_tuple

PROTOCOL_VERSION = 1

_REQUEST = struct.Struct("<BBBBdHHI")
_REPLY = struct.Struct("<BBBBI")
_EXTENSION = struct.Struct("<BI")
_PLAIN = 1
_MAX_NAME_BYTES = 255
_NEVER = math.inf

Extensions = tuple[tuple[str, bytes], ...]


class Operation(enum.IntEnum):
    """The operation that a request asks of the worker that receives it."""

    CALL = 1
    """Run a function, reply with its result."""
    CREATE = 2
    """Run a function, keep its result under the RRef id in ``target``, reply when done."""
    FETCH = 3
    """Reply with the value of the RRef in ``target`` once it exists."""
    EXTENSION = 4
    """Hand the payload to the extension named in ``target``."""
    METHOD = 5
    """Call a method of the value of the RRef in ``target``, named in ``function``; as CALL."""


class Status(enum.IntEnum):
    """The way a request ended."""

    OK = 0
    ERROR = 1
    """The payload is an error packed by ``remote_errors``."""


_OPERATIONS = {int(operation): operation for operation in Operation}
_STATUSES = {int(status): status for status in Status}


class Request(NamedTuple):
    """The header of a request.

    Args:
        operation: what to do.
        plain: decoding the payload runs no user code.
        timeout: seconds left to the call; 0 means no deadline.
        target: what the operation works on, packed by its user.
        extensions: metadata by extension name.
        references: the RRefs in the value, packed by ``control``.
        tensor_table: the tensors in the value, packed by ``tensor_table``.
        function: the name of the function to call, whose arguments are then the
            payload; empty if the payload holds function and arguments.
    """

    operation: Operation
    plain: bool = True
    timeout: float = 0.0
    target: bytes = b""
    extensions: Extensions = ()
    references: bytes = b""
    tensor_table: bytes = b""
    function: bytes = b""

    def encode(self) -> bytes:
        """Packs the header.

        Raises:
            EncodeError: a part of it is too large for the layout.
        """
        operation, plain, timeout, target, extensions, references, table, function = self
        try:
            head = _REQUEST.pack(
                PROTOCOL_VERSION,
                operation,
                _PLAIN if plain else 0,
                len(extensions),
                timeout,
                len(function),
                len(target),
                len(references),
            )
        except struct.error:
            raise caused(
                EncodeError(
                    "a request can name a function and a target of 65535 bytes each and carry 255 "
                    f"extensions; this one has {len(function)} and {len(target)} bytes and "
                    f"{len(extensions)} extensions"
                ),
                None,
            ) from None
        if not (target or extensions or references):
            return head + function + table
        packed = _pack_extensions(extensions) if extensions else b""
        return b"".join((head, function, target, packed, references, table))

    @classmethod
    def decode(cls, data: bytes) -> Request:
        """Unpacks a header.

        Raises:
            FrameError: the bytes are not a request of this protocol version.
        """
        try:
            version, op, flags, n_ext, timeout, n_func, n_target, n_refs = _REQUEST.unpack_from(
                data
            )
        except struct.error:
            raise caused(
                FrameError(f"a request header of {len(data)} bytes is too short"), None
            ) from None
        if version != PROTOCOL_VERSION:
            raise _wrong_version(version)
        operation = _OPERATIONS.get(op)
        if operation is None:
            raise FrameError(f"unknown operation {op}")
        if not 0.0 <= timeout < _NEVER:
            raise FrameError(f"a request cannot have {timeout} seconds left")
        start = _REQUEST.size + n_func
        function = data[_REQUEST.size : start]
        target = data[start : start + n_target]
        start += n_target
        extensions: Extensions = ()
        if n_ext:
            extensions, start = _unpack_extensions(data, start, n_ext)
        end = start + n_refs
        if end > len(data):
            raise _too_short(data, end)
        plain, references, table = flags & _PLAIN == _PLAIN, data[start:end], data[end:]
        return new_tuple(
            cls, (operation, plain, timeout, target, extensions, references, table, function)
        )


@functools.lru_cache(maxsize=4096)
def request_prefix(operation: Operation, function: bytes, timeout: float, plain: bool) -> bytes:
    """The header of a request without target, extensions and references, up to its table.

    A program's calls have few different ones, so most are packed once.
    """
    return Request(operation, plain, timeout, function=function).encode()


class Reply(NamedTuple):
    """The header of a reply; see :class:`Request` for the sections."""

    status: Status
    plain: bool = True
    extensions: Extensions = ()
    references: bytes = b""
    tensor_table: bytes = b""

    def encode(self) -> bytes:
        """Packs the header.

        Raises:
            EncodeError: a part of it is too large for the layout.
        """
        status, plain, extensions, references, table = self
        flags = _PLAIN if plain else 0
        try:
            head = _REPLY.pack(PROTOCOL_VERSION, status, flags, len(extensions), len(references))
        except struct.error:
            raise caused(
                EncodeError(f"a reply can carry 255 extensions; this one has {len(extensions)}"),
                None,
            ) from None
        if not (extensions or references):
            return head + table
        packed = _pack_extensions(extensions)
        return b"".join((head, packed, references, table))

    @classmethod
    def decode(cls, data: bytes) -> Reply:
        """Unpacks a header.

        Raises:
            FrameError: the bytes are not a reply of this protocol version.
        """
        try:
            version, status, flags, n_ext, n_refs = _REPLY.unpack_from(data)
        except struct.error:
            raise caused(
                FrameError(f"a reply header of {len(data)} bytes is too short"), None
            ) from None
        if version != PROTOCOL_VERSION:
            raise _wrong_version(version)
        known = _STATUSES.get(status)
        if known is None:
            raise FrameError(f"unknown reply status {status}")
        extensions: Extensions = ()
        start = _REPLY.size
        if n_ext:
            extensions, start = _unpack_extensions(data, start, n_ext)
        end = start + n_refs
        if end > len(data):
            raise _too_short(data, end)
        plain = flags & _PLAIN == _PLAIN
        return new_tuple(cls, (known, plain, extensions, data[start:end], data[end:]))


BARE_REPLY: Final = Reply(Status.OK)
"""Of a call that succeeded, whose value has neither tensors nor references."""
BARE_REPLY_HEADER: Final = BARE_REPLY.encode()
REQUEST_FIXED_BYTES: Final = _REQUEST.size
FUNCTION_LENGTH_AT: Final = struct.calcsize("<BBBBd")
"""The position in a request's header of two bytes that tell how long its function's name is."""


def _wrong_version(version: int) -> FrameError:
    return FrameError(
        f"message of protocol version {version}; this worker speaks {PROTOCOL_VERSION}"
    )


def _too_short(data: bytes, end: int) -> FrameError:
    """The error for sections that run past the end of their header: the last ends there."""
    return FrameError(f"the sections of a header of {len(data)} bytes end after {end}")


def _pack_extensions(extensions: Extensions) -> bytes:
    parts: list[bytes] = []
    for name, data in extensions:
        encoded = name.encode()
        if len(encoded) > _MAX_NAME_BYTES:
            raise EncodeError(f"the name of an extension has at most 255 bytes, unlike {name!r}")
        parts += (_EXTENSION.pack(len(encoded), len(data)), encoded, data)
    return b"".join(parts)


def _unpack_extensions(data: bytes, start: int, count: int) -> tuple[Extensions, int]:
    extensions: list[tuple[str, bytes]] = []
    try:
        for _ in range(count):
            n_name, n_data = _EXTENSION.unpack_from(data, start)
            start += _EXTENSION.size
            end = start + n_name
            name = data[start:end].decode()
            start = end + n_data
            extensions.append((name, data[end:start]))
    except struct.error:
        raise caused(FrameError("an extension runs past the end of its header"), None) from None
    except UnicodeDecodeError:
        raise caused(FrameError("an extension's name is not UTF-8"), None) from None
    return tuple(extensions), start
