"""The JSON manifest of a checkpoint: which tensor lies in which shard, in frozen dataclasses.

Each process that writes a part leaves a :class:`PartManifest`; whoever commits merges
them into one :class:`Manifest`. Reading checks every field, so that what comes out can
be relied on. Nothing here touches a file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from types import MappingProxyType
from typing import Any, Final, TypeVar

from tensorwire.checkpoint.errors import DamagedCheckpointError, UnsavableValueError

FORMAT: Final = "tensorwire-checkpoint"
VERSION: Final = 1

_T = TypeVar("_T")
Meta = Mapping[str, Any]
"""Plain JSON data that the writer keeps beside its tensors."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: the shard that holds it, its dtype as safetensors names it, its shape."""

    shard: str
    dtype: str
    shape: tuple[int, ...]


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
    return _dump({"format": FORMAT, "version": VERSION, **_plain(part)})


def dump(manifest: Manifest) -> str:
    """The JSON text of a checkpoint's manifest.

    Raises:
        UnsavableValueError: some ``meta`` is not plain JSON data.
    """
    parts = {name: _plain(part) for name, part in manifest.parts.items()}
    head = {"format": FORMAT, "version": VERSION, "sequence": manifest.sequence}
    return _dump({**head, "meta": dict(manifest.meta), "parts": parts})


def load_part(text: str, where: str) -> PartManifest:
    """Reads a part's manifest; ``where`` names the file in errors.

    Raises:
        DamagedCheckpointError: the text is no such manifest.
    """
    return _part(_document(text, where), where)


def load(text: str, where: str) -> Manifest:
    """Reads a checkpoint's manifest; ``where`` names the file in errors.

    Raises:
        DamagedCheckpointError: the text is no such manifest.
    """
    document = _document(text, where)
    parts = {
        name: _part(_typed(part, dict, f"parts[{name!r}]", where), where)
        for name, part in _field(document, "parts", dict, where).items()
    }
    sequence = _field(document, "sequence", int, where)
    return Manifest(sequence, _meta(document, where), MappingProxyType(parts))


def _plain(part: PartManifest) -> dict[str, Any]:
    tensors = {name: asdict(entry) for name, entry in part.tensors.items()}
    return {"meta": dict(part.meta), "shards": dict(part.shards), "tensors": tensors}


def _dump(document: dict[str, Any]) -> str:
    try:
        return json.dumps(document, allow_nan=False, indent=1)
    except (TypeError, ValueError) as error:
        raise UnsavableValueError(f"meta must be plain JSON data: {error}") from None


def _document(text: str, where: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DamagedCheckpointError(f"{where} is not JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise DamagedCheckpointError(f"{where} is not a manifest of format {FORMAT!r}")
    if document.get("version") != VERSION:
        raise DamagedCheckpointError(
            f"{where} has version {document.get('version')!r}, this release reads {VERSION}"
        )
    return document


def _part(document: dict[str, Any], where: str) -> PartManifest:
    shards = _field(document, "shards", dict, where)
    for shard, size in shards.items():
        _require(shard == PurePosixPath(shard).name, f"shard {shard!r} is not a file name", where)
        _typed(size, int, f"size of {shard!r}", where)
    tensors = {
        name: _entry(_typed(entry, dict, f"tensor {name!r}", where), where)
        for name, entry in _field(document, "tensors", dict, where).items()
    }
    for name, entry in tensors.items():
        _require(entry.shard in shards, f"tensor {name!r} is in no listed shard", where)
    return PartManifest(_meta(document, where), MappingProxyType(shards), MappingProxyType(tensors))


def _entry(document: dict[str, Any], where: str) -> TensorEntry:
    shape = _field(document, "shape", list, where)
    _require(all(type(size) is int and size >= 0 for size in shape), f"shape {shape!r}", where)
    return TensorEntry(
        _field(document, "shard", str, where), _field(document, "dtype", str, where), tuple(shape)
    )


def _meta(document: dict[str, Any], where: str) -> Meta:
    return MappingProxyType(_field(document, "meta", dict, where))


def _field(document: dict[str, Any], name: str, kind: type[_T], where: str) -> _T:
    return _typed(document.get(name), kind, name, where)


def _typed(value: object, kind: type[_T], name: str, where: str) -> _T:
    _require(isinstance(value, kind), f"{name} is {value!r}, not a {kind.__name__}", where)
    return value  # type: ignore[return-value]  # checked in the line above


def _require(held: bool, otherwise: str, where: str) -> None:
    if not held:
        raise DamagedCheckpointError(f"{where}: {otherwise}")
