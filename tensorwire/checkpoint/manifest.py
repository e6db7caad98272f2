"""The JSON manifest of a checkpoint: which tensor lies in which shard, in frozen dataclasses.

Each process that writes a part leaves a :class:`PartManifest`; whoever commits merges
them into one :class:`Manifest`. It has a checksum of each tensor, and ends with one of its own
text. Reading checks every field, so that what comes out can be relied on. Nothing here touches a
file.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Final, TypeVar

from tensorwire.checkpoint.bounded import DEPTH, MANIFEST_BYTES, depth, parse
from tensorwire.checkpoint.checksums import checksum_of, fits
from tensorwire.checkpoint.errors import DamagedCheckpointError, UnsavableValueError

FORMAT: Final = "tensorwire-checkpoint"
VERSION: Final = 2
ITEM_BYTES: Final[Mapping[str, int]] = MappingProxyType(
    {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "BOOL": 1}
    | {f"{sign}{bits}": bits // 8 for sign in "IU" for bits in (8, 16, 32, 64)}
)
"""The bytes of an element of each dtype, by safetensors' name."""

_MOST: Final = 1 << 62
_SHARD: Final = re.compile(r"[A-Za-z0-9_.~%-]{1,240}\.safetensors")
_SEAL: Final = re.compile(rb',\n "checksum": "([^"\n]{1,200})"\n}\s*\Z')

_T = TypeVar("_T")
Meta = Mapping[str, Any]
"""Plain JSON data that the writer keeps beside its tensors."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor.

    Args:
        shard: the file that holds it.
        dtype: as safetensors names it.
        shape: its sizes.
        checksum: of its bytes, see ``checksums``.
    """

    shard: str
    dtype: str
    shape: tuple[int, ...]
    checksum: str

    @property
    def bytes(self) -> int:
        """The bytes that it takes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class PartManifest:
    """The part of a checkpoint that one process wrote.

    Args:
        meta: the writer's plain data.
        shards: the size in bytes of each shard.
        tensors: by name.
    """

    meta: Meta
    shards: Mapping[str, int]
    tensors: Mapping[str, TensorEntry]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint.

    Args:
        sequence: grows with each checkpoint that is committed beside others.
        meta: the committer's plain data.
        parts: what each process wrote, by the part's name.
    """

    sequence: int
    meta: Meta
    parts: Mapping[str, PartManifest]


def dump_part(part: PartManifest) -> str:
    """The JSON text of a part's manifest.

    Raises:
        UnsavableValueError: ``part.meta`` is not plain JSON data.
    """
    return dumped({"format": FORMAT, "version": VERSION, **_plain(part)})


def dump(manifest: Manifest) -> str:
    """The JSON text of a checkpoint's manifest.

    Raises:
        UnsavableValueError: some ``meta`` is not plain JSON data.
    """
    parts = {name: _plain(part) for name, part in manifest.parts.items()}
    head = {"format": FORMAT, "version": VERSION, "sequence": manifest.sequence}
    return dumped({**head, "meta": dict(manifest.meta), "parts": parts})


def load_part(text: bytes, where: str) -> PartManifest:
    """Reads a part's manifest; ``where`` names the file in errors.

    Raises:
        DamagedCheckpointError: the text is no such manifest.
    """
    return _part(unsealed(text, where, FORMAT, VERSION), where)


def load(text: bytes, where: str) -> Manifest:
    """Reads a checkpoint's manifest; ``where`` names the file in errors.

    Raises:
        DamagedCheckpointError: the text is no such manifest.
    """
    document = unsealed(text, where, FORMAT, VERSION)
    parts = {
        name: _part(typed(part, dict, f"parts[{name!r}]", where), where)
        for name, part in field(document, "parts", dict, where).items()
    }
    shards = [shard for part in parts.values() for shard in part.shards]
    require(len(shards) == len(set(shards)), "two parts have one shard", where)
    sequence = count(document.get("sequence"), "sequence", where)
    return Manifest(sequence, _meta(document, where), MappingProxyType(parts))


def _plain(part: PartManifest) -> dict[str, Any]:
    tensors = {name: asdict(entry) for name, entry in part.tensors.items()}
    return {"meta": dict(part.meta), "shards": dict(part.shards), "tensors": tensors}


def dumped(document: dict[str, Any], name: str = "meta") -> str:
    """JSON text of an object with its own checksum; ``name`` is that of the user's data in it.

    Raises:
        UnsavableValueError: it is not plain JSON data, or more than is read again.
    """
    try:
        text = json.dumps(document, allow_nan=False, indent=1)
        _refuse_unreadable(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise UnsavableValueError(f"{name} must be plain JSON data: {error}") from None
    return sealed(text)


def sealed(text: str) -> str:
    """JSON text of an object, indented by 1, with its own checksum at the end."""
    body = text.removesuffix("\n}")
    checksum = checksum_of(memoryview(body.encode()))
    return f'{body},\n "checksum": "{checksum}"\n}}'


def _refuse_unreadable(text: bytes) -> None:
    if depth(text) > DEPTH:
        raise ValueError(f"it has more than {DEPTH} levels in each other")
    if len(text) > MANIFEST_BYTES - 1024:
        raise ValueError(
            f"it takes {len(text)} bytes in the manifest, more than the {MANIFEST_BYTES} that are "
            "read again; keep large data in tensors"
        )


def unsealed(text: bytes, where: str, form: str, version: int) -> dict[str, Any]:
    """The object of JSON text that :func:`sealed` made; ``where`` names the file in errors.

    Raises:
        DamagedCheckpointError: the text is of another ``form`` (``"format"``) or ``version``, or
            does not fit its checksum.
    """
    seal = _SEAL.search(text, max(0, len(text) - 512))
    document = parse(text, where)
    if not isinstance(document, dict) or document.get("format") != form:
        raise DamagedCheckpointError(f"{where} is not a manifest of format {form!r}")
    if document.get("version") != version:
        raise DamagedCheckpointError(
            f"{where} has version {_shown(document.get('version'))}, this release reads {version}"
        )
    if seal is None or not fits(seal[1].decode(errors="replace"), memoryview(text)[: seal.start()]):
        raise DamagedCheckpointError(f"{where} is damaged: it does not fit its own checksum")
    return document


def _part(document: dict[str, Any], where: str) -> PartManifest:
    shards = field(document, "shards", dict, where)
    for shard, size in shards.items():
        require(bool(_SHARD.fullmatch(shard)), f"shard {shard!r} is not a file name", where)
        count(size, f"size of {shard!r}", where)
    tensors = {
        name: _entry(typed(entry, dict, f"tensor {name!r}", where), where)
        for name, entry in field(document, "tensors", dict, where).items()
    }
    room = dict(shards)
    for name, entry in tensors.items():
        require(entry.shard in shards, f"tensor {name!r} is in no listed shard", where)
        room[entry.shard] -= entry.bytes
        require(room[entry.shard] >= 0, f"tensor {name!r} is larger than its shard", where)
    return PartManifest(_meta(document, where), MappingProxyType(shards), MappingProxyType(tensors))


def _entry(document: dict[str, Any], where: str) -> TensorEntry:
    shape = field(document, "shape", list, where)
    dtype = field(document, "dtype", str, where)
    require(len(shape) <= 64, f"a shape of {len(shape)} sizes", where)
    require(dtype in ITEM_BYTES, f"dtype {_shown(dtype)}", where)
    sizes = tuple(count(size, "a size of a tensor", where) for size in shape)
    checksum = field(document, "checksum", str, where)
    return TensorEntry(field(document, "shard", str, where), dtype, sizes, checksum)


def _meta(document: dict[str, Any], where: str) -> Meta:
    return MappingProxyType(field(document, "meta", dict, where))


def field(document: dict[str, Any], name: str, kind: type[_T], where: str) -> _T:
    """A field of an object, which must be there and of this kind."""
    return typed(document.get(name), kind, name, where)


def typed(value: object, kind: type[_T], name: str, where: str) -> _T:
    """The value, which must be of this kind exactly."""
    require(type(value) is kind, f"{name} is {_shown(value)}, not a {kind.__name__}", where)
    return value  # type: ignore[return-value]  # checked in the line above


def count(value: object, name: str, where: str) -> int:
    """The value, which must be a whole number from 0."""
    number = typed(value, int, name, where)
    require(0 <= number < _MOST, f"{name} is {_shown(number)}", where)
    return number


def require(held: bool, otherwise: str, where: str) -> None:
    """Refuses what does not hold.

    Raises:
        DamagedCheckpointError: it does not; ``otherwise`` says what is wrong in the file ``where``.
    """
    if not held:
        raise DamagedCheckpointError(f"{where}: {otherwise}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
