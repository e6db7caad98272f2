"""Folders of checkpoints that somebody changed: bytes, the manifest's structure, names.

Whatever is there, reading it takes bounded time and memory, and raises ``CheckpointError`` alone.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from tensorwire import checkpoint, parameter_server
from tensorwire.checkpoint import CheckpointError
from tensorwire.checkpoint.manifest import sealed
from tensorwire.parameter_server.declarations.dense_spec import Spread, describe
from tensorwire.parameter_server.declarations.initialisers import Constant
from tensorwire.parameter_server.declarations.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.declarations.rules import Adam
from tensorwire.parameter_server.declarations.spec import Precision, TableSpec
from tensorwire.parameter_server.snapshots.contents import Restored
from tensorwire.parameter_server.snapshots.fit import fit_of
from tensorwire.parameter_server.snapshots.kept import Keeping
from tests.fuzz.mutations import changed
from tests.tensorwire.parameter_server.snapshots import shards

Draw = random.Random
Files = dict[str, bytes]
_MANIFEST = "manifest.json"


def checkpoints(draw: Draw) -> None:
    """A folder in the place of a checkpoint."""
    with changed_folder(draw, _checkpoint()) as folder:
        with contextlib.suppress(CheckpointError):
            checkpoint.Checkpoint.open(folder).verify()
        model = torch.nn.Linear(3, 2)
        with contextlib.suppress(CheckpointError):
            checkpoint.load(folder, {"model": model, "step": 0})
        with contextlib.suppress(CheckpointError):
            checkpoint.latest(folder.parent)


def snapshots(draw: Draw) -> None:
    """A folder in the place of a parameter server's snapshot."""
    spec, right = _snapshot()
    with changed_folder(draw, right) as folder:
        with contextlib.suppress(CheckpointError):
            parameter_server.read(folder, "items")
        with contextlib.suppress(CheckpointError):
            restored = Restored.open(folder)
            restored.verify()
            for name, saved in restored.described.items():
                Keeping.decode(Keeping(saved, str(folder), strict=True).encode())
                fit_of(saved, spec)
                if name == spec.name and not fit_of(saved, spec).misfits:
                    shards.restore(folder, 2, {name: spec.encode()})
            shards.restore(folder, 1, {})


@functools.cache
def _snapshot() -> tuple[TableSpec, Mapping[str, bytes]]:
    spec = TableSpec(
        "items", 2, Adam(), Constant(), MinCount(2), UnusedFor(9), Precision.BFLOAT16
    )  # fmt: skip
    parameters = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(2))]
    dense = describe("net", torch.optim.Adam(parameters), Spread.ELEMENTS)
    with tempfile.TemporaryDirectory() as folder:
        shards.save(Path(folder, "1"), [spec, dense])
        return spec, files_of(Path(folder, "1"))


@functools.cache
def _checkpoint() -> Mapping[str, bytes]:
    state = {"model": torch.nn.Linear(3, 2), "step": 7, "rest": [torch.arange(4), {"a": (1, 2.5)}]}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(f"{folder}/1", state)
        return files_of(Path(folder, "1"))


def files_of(folder: Path) -> Files:
    """The content of each file."""
    return {each.name: each.read_bytes() for each in folder.iterdir()}


@contextlib.contextmanager
def changed_folder(draw: Draw, right: Mapping[str, bytes]) -> Any:
    """A folder with these files after some changes."""
    files = dict(right)
    for _ in range(draw.choice((1, 1, 2, 4))):
        draw.choice((_bytes, _structure, _structure, _structure, _names))(draw, files)
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "folder")
        folder.mkdir()
        for name, content in files.items():
            with contextlib.suppress(OSError, ValueError):  # a name that no file can have
                (folder / name).write_bytes(content)
        if draw.random() < 0.1:
            _odd(draw, folder)
        yield folder


def _bytes(draw: Draw, files: Files) -> None:
    """Bytes of one file."""
    if files:
        name = draw.choice(sorted(files))
        files[name] = changed(draw, [files[name]])


def _names(draw: Draw, files: Files) -> None:
    """The names of the files."""
    if not files:
        return
    one, other = draw.choice(sorted(files)), draw.choice(sorted(files))
    kind = draw.randrange(4)
    if kind == 0:
        files[one], files[other] = files[other], files[one]
    elif kind == 1:
        files[draw.choice(("x", "copy.safetensors", "manifest.json.tmp-1"))] = files[one]
    elif kind == 2:
        del files[one]
    else:
        files[changed(draw, [one.encode()]).decode("latin-1").replace("/", "_")] = files.pop(one)


def _odd(draw: Draw, folder: Path) -> None:
    """Something else than a file."""
    path = draw.choice([folder / _MANIFEST, *sorted(folder.glob("*.safetensors"))])
    with contextlib.suppress(OSError):
        path.unlink()
        draw.choice((path.mkdir, lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")))()


def _structure(draw: Draw, files: Files) -> None:
    """The values of the manifest, which then has the checksum of what it says."""
    try:
        document = json.loads(files[_MANIFEST])
        document.pop("checksum", None)
    except (KeyError, ValueError, AttributeError, RecursionError):
        return
    for _ in range(draw.choice((1, 1, 2, 5))):
        places: list[tuple[Any, Any]] = []
        _collect(document, places)
        if places:
            container, key = draw.choice(places)
            draw.choice(_CHANGES)(draw, container, key, places)
    with contextlib.suppress(ValueError, TypeError):
        files[_MANIFEST] = sealed(json.dumps(document, indent=1)).encode("utf-8", "surrogatepass")


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _collect(value[key], places)


def _value(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    container[key] = draw.choice(
        (None, True, -1, 0, 1, 3, 2**40, 10**40, 1.5, "", "x", "\ud800", "a\0b", [], {}, [[]])
    )  # fmt: skip


def _number(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(container[key], int):
        container[key] += draw.choice((-1, 1, 64, 1 << 33))


def _other(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    """A value from elsewhere, not the same object, lest there is a circle."""
    source, at = draw.choice(places)
    container[key] = json.loads(json.dumps(source[at]))


def _remove(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    del container[key]


def _rename(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(container, dict):
        names = [at for _, at in places if isinstance(at, str)]
        container[draw.choice([*names, f"{key}x", ""])] = container.pop(key)


def _twice(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    copy = json.loads(json.dumps(container[key]))
    if isinstance(container, dict):
        container[f"{key}{draw.randrange(3)}"] = copy
    else:
        container.append(copy)


def _deep(draw: Draw, container: Any, key: Any, places: list[tuple[Any, Any]]) -> None:
    for _ in range(draw.choice((3, 150))):
        container[key] = [container[key]] if draw.random() < 0.5 else {"a": container[key]}


_CHANGES: tuple[Callable[[Draw, Any, Any, list[tuple[Any, Any]]], None], ...] = (
    _value, _value, _number, _other, _other, _remove, _rename, _rename, _twice, _deep,
)  # fmt: skip
