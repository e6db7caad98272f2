"""Writes one safetensors file tensor by tensor, without holding any of them; reads one, checked.

The format puts its header first, and the header says where each tensor ends. So room
for the header is left at the start, tensors are appended as they come, and the header is
filled in at the end, padded with spaces, which the format allows.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from tensorwire.checkpoint.bounded import opened
from tensorwire.checkpoint.checksums import Checksum, checksum_of, fits
from tensorwire.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    UnsavableValueError,
)
from tensorwire.checkpoint.manifest import TensorEntry

_LENGTH: Final = struct.Struct("<Q")
_HEADER_ROOM: Final = (64 << 10) - _LENGTH.size  # tensors begin at a multiple of 64 bytes
_CHUNK: Final = 1 << 20  # written while its checksum's bytes are still in the cache

DTYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""The name that safetensors has for each dtype that it can hold."""


def require_safetensors() -> None:
    """Checks that the library is there with which a checkpoint is read again.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise CheckpointError(
            "checkpoints need the library safetensors: pip install 'tensorwire[checkpoint]'"
        ) from None


class ShardFile:
    """One safetensors file that is being written.

    Args:
        path: the file, which must not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes = 0
        self._entries: dict[str, dict[str, object]] = {}
        self._header_bytes = len("{}")
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # closed by finish or abandon
        self._file.seek(_LENGTH.size + _HEADER_ROOM)

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Says whether the header has room for this tensor's entry."""
        return not self._entries or (
            self._header_bytes + _entry_bytes(name, tensor, self.bytes) <= _HEADER_ROOM
        )

    def append(self, name: str, tensor: torch.Tensor) -> TensorEntry:
        """Writes a tensor behind the others, and returns what a manifest says of it.

        Raises:
            UnsavableValueError: safetensors knows no such tensors.
        """
        dtype = dtype_name(name, tensor)
        flat = tensor.detach().to("cpu").contiguous().reshape(-1)
        begin = self.bytes
        self.bytes += flat.numel() * flat.element_size()
        self._header_bytes += _entry_bytes(name, tensor, self.bytes)
        self._entries[name] = {
            "dtype": dtype,
            "shape": list(tensor.shape),
            "data_offsets": [begin, self.bytes],
        }
        checksum = self._write(flat)
        return TensorEntry(self.path.name, dtype, tuple(tensor.shape), checksum)

    def _write(self, flat: torch.Tensor) -> str:
        checksum = Checksum()
        data = bytes_of(flat)
        for begin in range(0, len(data), _CHUNK):
            chunk = data[begin : begin + _CHUNK]
            checksum.update(chunk)
            _write_all(self._file.fileno(), chunk)
        return checksum.text

    def finish(self) -> int:
        """Writes the header, forces all to disk and closes; returns the file's size in bytes."""
        header = json.dumps(self._entries, separators=(",", ":")).encode()
        if len(header) > _HEADER_ROOM:  # one tensor with an enormous name
            self.abandon()
            raise UnsavableValueError(f"a name of {len(header)} bytes is too long for a tensor")
        self._file.seek(0)
        _write_all(
            self._file.fileno(),
            memoryview(_LENGTH.pack(_HEADER_ROOM) + header.ljust(_HEADER_ROOM)),
        )
        os.fsync(self._file.fileno())
        self._file.close()
        return _LENGTH.size + _HEADER_ROOM + self.bytes

    def abandon(self) -> None:
        """Closes the file as it is."""
        self._file.close()


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the host's memory whose elements lie behind each other."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The name that safetensors has for the dtype of ``tensor``.

    Raises:
        UnsavableValueError: it has no name for it, or the tensor has no memory of its own kind.
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        raise UnsavableValueError(
            f"tensor {name!r} is {tensor.layout} on {tensor.device}: only tensors with memory "
            "of layout torch.strided can be saved; convert it with .to_dense()"
        )
    if tensor.dtype not in DTYPES:
        raise UnsavableValueError(
            f"tensor {name!r} is of {tensor.dtype}, which safetensors cannot hold; "
            f"what it can: {', '.join(map(str, DTYPES))}"
        )
    return DTYPES[tensor.dtype]


def _entry_bytes(name: str, tensor: torch.Tensor, offset: int) -> int:
    """An upper bound of what an entry adds to the header."""
    longest_offset = len(str(offset + tensor.numel() * tensor.element_size()))
    fixed = len('"":{"dtype":"F8_E4M3","shape":[],"data_offsets":[,]},')
    return fixed + len(json.dumps(name)) + len(str(list(tensor.shape))) + 2 * longest_offset


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


# --- reading


def require_size(path: Path, size: int) -> None:
    """Checks that a shard is there, a regular file of so many bytes.

    Raises:
        DamagedCheckpointError: it is not.
    """
    with opened(path) as (_, there):
        if there != size:
            raise DamagedCheckpointError(f"{path} has {there} bytes of {size}")


@contextlib.contextmanager
def reading(path: Path, size: int) -> Iterator[Any]:
    """A shard as safetensors opens it.

    Raises:
        DamagedCheckpointError: it is no regular file of so many bytes, or has another header than
            a :class:`ShardFile` writes.
    """
    from safetensors import safe_open

    require_size(path, size)
    with opened(path) as (descriptor, _):
        length = os.pread(descriptor, _LENGTH.size, 0)
    if len(length) < _LENGTH.size or _LENGTH.unpack(length)[0] != _HEADER_ROOM:
        raise DamagedCheckpointError(f"{path} has no header as shards have it")
    try:
        opening = safe_open(path, framework="pt")
    except Exception as error:  # of safetensors, of Rust, of the file system
        raise DamagedCheckpointError(f"{path}: {error}") from error
    with opening as shard:
        yield shard


def tensor_of(shard: Any, path: Path, name: str, entry: TensorEntry) -> torch.Tensor:
    """A tensor of an open shard, mapped from the file, if it is of the kind that its entry says.

    Raises:
        DamagedCheckpointError: it is not there, or of another dtype or shape.
    """
    try:
        tensor: torch.Tensor = shard.get_tensor(name)
    except Exception as error:
        raise DamagedCheckpointError(f"{path}: tensor {name!r}: {error}") from error
    if (DTYPES.get(tensor.dtype), tuple(tensor.shape)) != (entry.dtype, entry.shape):
        raise DamagedCheckpointError(
            f"{path}: tensor {name!r} is {tensor.dtype} of shape {tuple(tensor.shape)}; the "
            f"manifest says {entry.dtype} of shape {entry.shape}"
        )
    return tensor


def require_checksum(tensor: torch.Tensor, path: Path, name: str, entry: TensorEntry) -> None:
    """Checks the bytes of a tensor.

    Raises:
        DamagedCheckpointError: they are not those that were written.
    """
    if not fits(entry.checksum, bytes_of(tensor)):
        checksum = checksum_of(bytes_of(tensor), entry.checksum.partition(":")[0])
        raise DamagedCheckpointError(
            f"{path}: tensor {name!r} is damaged: its checksum is {checksum}, not {entry.checksum}"
        )
