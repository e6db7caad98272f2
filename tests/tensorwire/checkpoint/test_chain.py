"""Chains of versions: what is committed is whole, what is missing or not itself is noticed."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tensorwire.checkpoint import (
    Chain,
    ChainWriter,
    CheckpointError,
    DamagedCheckpointError,
    Kind,
    MismatchError,
    NoCheckpointError,
    UnsavableValueError,
    Version,
    VersionFile,
)
from tensorwire.checkpoint.manifest import sealed
from tests.tensorwire.checkpoint.folders import flip


def _commit(writer: ChainWriter, kind: Kind, step: int = 0) -> Version:
    """Commits a version with two files, whose content tells its number."""
    number = writer.next_number()
    names = ("shard-0.safetensors", "shard-1.safetensors")
    folder = writer.folder_of(number)
    for name in names:
        (folder / name).write_bytes(f"{name} of version {number}\n".encode() * 8)
    files = {name: VersionFile.of(folder / name) for name in names}
    return writer.commit(number, kind, step, files, {"number": number}, at=float(step))


def _fill(folder: Path, kinds: str) -> list[Version]:
    """Writes a chain: a letter for each version, ``b`` for a base and ``d`` for a delta."""
    with ChainWriter(folder, keep_bases=9) as writer:
        kind_of = {"b": Kind.BASE, "d": Kind.DELTA}
        return [_commit(writer, kind_of[each], step) for step, each in enumerate(kinds)]


def _numbers(versions: tuple[Version, ...]) -> list[int]:
    return [each.number for each in versions]


def test_a_route_leads_from_nothing_or_from_what_one_has_to_the_newest(tmp_path: Path) -> None:
    versions = _fill(tmp_path, "bddbdd")
    chain = Chain.open(tmp_path)
    assert chain.versions() == tuple(versions)
    assert chain.latest() == versions[5]
    assert _numbers(chain.route()) == [3, 4, 5]
    assert _numbers(chain.route(versions[1])) == [3, 4, 5]
    assert _numbers(chain.route(versions[3])) == [4, 5]
    assert _numbers(chain.route(versions[4])) == [5]
    assert chain.route(versions[5]) == ()
    assert _numbers(chain.route(to=versions[2])) == [0, 1, 2]
    assert _numbers(chain.route(versions[0], versions[2])) == [1, 2]


def test_a_version_says_what_was_committed(tmp_path: Path) -> None:
    _fill(tmp_path, "bd")
    base, delta = Chain.open(tmp_path).versions()
    assert (base.kind, base.base, base.previous, base.step, base.time) == (Kind.BASE, 0, None, 0, 0)
    assert (delta.kind, delta.base, delta.previous, delta.step) == (Kind.DELTA, 0, 0, 1)
    assert delta.follows(base)
    assert delta.about == {"number": 1}
    assert delta.path("shard-1.safetensors").read_bytes().startswith(b"shard-1.safetensors of ver")
    assert delta.bytes == sum(each.stat().st_size for each in delta.folder.glob("*.safetensors"))
    with pytest.raises(KeyError):
        delta.path("other")


def test_a_folder_without_versions_is_a_chain_that_has_none_yet(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="there is no folder"):
        Chain.open(tmp_path / "later")
    with ChainWriter(tmp_path / "later") as writer:
        assert writer.needs_base
        assert writer.latest() is None
        chain = Chain.open(tmp_path / "later")
        assert chain.latest() is None
        assert chain.route() == ()
        first = _commit(writer, Kind.BASE)
        assert not writer.needs_base
        assert writer.latest() == first
    assert chain.again().route() == (first,)


def test_a_draft_is_no_version_and_its_number_is_not_given_again(tmp_path: Path) -> None:
    _fill(tmp_path, "b")
    with ChainWriter(tmp_path) as writer:
        number = writer.next_number()
        (writer.folder_of(number) / "half").write_bytes(b"x")
        assert _numbers(Chain.open(tmp_path).versions()) == [0]
        shutil.copytree(writer.folder_of(number), tmp_path / "0000000007.tmp-0123456789ab")
    with ChainWriter(tmp_path) as writer:
        assert writer.next_number() == 8
        delta = _commit(writer, Kind.DELTA)
    assert (delta.number, delta.previous) == (9, 0)
    assert sorted(each.name for each in tmp_path.iterdir()) == [
        "0000000000.base",
        "0000000009.delta",
        "writer.lock",
    ]


def _write_and_vanish(folder: Path, lives: int, waits: int) -> None:
    """Ends as if it were killed, while a child of its own lives until its pipe is closed."""
    ChainWriter(folder)
    if os.fork() == 0:
        os.write(lives, b"x")
        os.read(waits, 1)
    os._exit(0)


def test_a_child_that_outlives_a_killed_writer_keeps_nobody_out(tmp_path: Path) -> None:
    (lives, told), (waits, end) = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        os.close(end)
        _write_and_vanish(tmp_path, told, waits)
    try:
        os.close(told)
        os.waitpid(child, 0)
        assert os.read(lives, 1) == b"x"
        ChainWriter(tmp_path).close()
    finally:
        os.close(end)
        assert os.read(lives, 1) == b"", "it has ended"
        os.close(lives)
        os.close(waits)


def test_two_writers_of_one_folder_are_refused(tmp_path: Path) -> None:
    with ChainWriter(tmp_path), pytest.raises(BlockingIOError, match="a chain has one writer"):
        ChainWriter(tmp_path)
    ChainWriter(tmp_path).close()
    with pytest.raises(ValueError, match="keep_bases=0"):
        ChainWriter(tmp_path, keep_bases=0)


def test_a_delta_needs_a_whole_version_before(tmp_path: Path) -> None:
    with ChainWriter(tmp_path) as writer, pytest.raises(CheckpointError, match="needs a base"):
        _commit(writer, Kind.DELTA)
    versions = _fill(tmp_path, "bd")
    (versions[-1].folder / "shard-0.safetensors").unlink()
    with ChainWriter(tmp_path) as writer:
        assert writer.needs_base
        with pytest.raises(CheckpointError, match="needs a base"):
            _commit(writer, Kind.DELTA)
        base = _commit(writer, Kind.BASE)
    assert Chain.open(tmp_path).route() == (base,)


def test_a_commit_that_fails_leaves_the_chain_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path, "b")
    with ChainWriter(tmp_path) as writer:
        number = writer.next_number()
        folder = writer.folder_of(number)
        (folder / "a").write_bytes(b"1")
        (folder / "b").write_bytes(b"2")
        file = VersionFile.of(folder / "a")
        with pytest.raises(DamagedCheckpointError, match="nobody named"):
            writer.commit(number, Kind.DELTA, 1, {"a": file}, {})
        number = writer.next_number()
        with pytest.raises(DamagedCheckpointError, match="cannot be read"):
            writer.commit(number, Kind.DELTA, 1, {"a": file}, {})
        for name in ("../a", "version.json", ".a", "a.tmp-b", ""):
            number = writer.next_number()
            with pytest.raises(CheckpointError, match="no name of a version's file"):
                writer.commit(number, Kind.DELTA, 1, {name: file}, {})
        with pytest.raises(UnsavableValueError, match="about must be plain JSON"):
            writer.commit(writer.next_number(), Kind.DELTA, 1, {}, {"x": object()})
        with pytest.raises(ValueError, match="step=-1"):
            writer.commit(writer.next_number(), Kind.DELTA, -1, {}, {})
        with pytest.raises(CheckpointError, match="version 0 is not newer"):
            writer.commit(0, Kind.DELTA, 1, {}, {})
        number = writer.next_number()
        writer.folder_of(number)
        monkeypatch.setattr(os, "fsync", _full_disk)
        with pytest.raises(OSError, match="No space left"):
            writer.commit(number, Kind.DELTA, 1, {}, {})
        monkeypatch.undo()
        assert sorted(each.name for each in tmp_path.iterdir()) == [
            "0000000000.base",
            "writer.lock",
        ]
        _commit(writer, Kind.DELTA)
    assert len(Chain.open(tmp_path).route()) == 2


def _full_disk(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_version_whose_name_cannot_be_forced_to_disk_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _fill(tmp_path, "b")
    inode = tmp_path.stat().st_ino
    sync = os.fsync
    with ChainWriter(tmp_path) as writer:
        with monkeypatch.context() as patch:

            def fail_for_the_chain(descriptor: int) -> None:
                if os.fstat(descriptor).st_ino == inode:
                    _full_disk(descriptor)
                sync(descriptor)

            patch.setattr(os, "fsync", fail_for_the_chain)
            with pytest.raises(OSError, match="No space left"):
                _commit(writer, Kind.DELTA)
        assert _numbers(Chain.open(tmp_path).versions()) == [0]
        assert _commit(writer, Kind.DELTA).previous == 0


def test_old_versions_go_when_enough_newer_bases_are_whole(tmp_path: Path) -> None:
    with ChainWriter(tmp_path, keep_bases=2) as writer:
        kept = []
        for kind in (Kind.BASE, Kind.DELTA, Kind.BASE, Kind.DELTA, Kind.BASE, Kind.DELTA):
            _commit(writer, kind)
            kept.append(_numbers(Chain.open(tmp_path).versions()))
    assert kept == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [2, 3, 4], [2, 3, 4, 5]]


def test_the_folder_of_another_chain_is_noticed(tmp_path: Path) -> None:
    mine, other = _fill(tmp_path / "mine", "bdd"), _fill(tmp_path / "other", "bddd")
    chain = Chain.open(tmp_path / "other")
    with pytest.raises(MismatchError, match="holds another chain"):
        chain.route(mine[0])
    shutil.rmtree(mine[1].folder)
    shutil.copytree(other[1].folder, mine[1].folder)
    with pytest.raises(MismatchError, match="are of different chains"):
        Chain.open(tmp_path / "mine").route()
    with pytest.raises(MismatchError, match="holds versions of 2 chains"):
        ChainWriter(tmp_path / "mine")


def test_an_older_copy_in_the_folders_place_is_noticed(tmp_path: Path) -> None:
    versions = _fill(tmp_path, "bdd")
    shutil.rmtree(versions[2].folder)
    with pytest.raises(MismatchError, match="an older copy was put in its place"):
        Chain.open(tmp_path).route(versions[2])


def _gap(versions: list[Version]) -> None:
    shutil.rmtree(versions[1].folder)


def _no_text(versions: list[Version]) -> None:
    (versions[1].folder / "version.json").unlink()


def _no_file(versions: list[Version]) -> None:
    (versions[1].folder / "shard-0.safetensors").unlink()


def _cut_short(versions: list[Version]) -> None:
    os.truncate(versions[1].folder / "shard-0.safetensors", 5)


def _exchanged(versions: list[Version]) -> None:
    """The second version says something else, and everything else fits it."""
    path = versions[1].folder / "version.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    path.write_text(sealed(json.dumps(document | {"step": 77}, indent=1)))


def _other_number(versions: list[Version]) -> None:
    shutil.rmtree(versions[1].folder)
    versions[2].folder.rename(versions[1].folder)


def _newest_is_damaged(versions: list[Version]) -> None:
    flip(versions[2].folder / "version.json", 40)


def _pipe(versions: list[Version]) -> None:
    (versions[1].folder / "version.json").unlink()
    os.mkfifo(versions[1].folder / "version.json")


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (_gap, "changes version 1, which .* does not have"),
        (_no_text, "changes version 1, which is damaged: .* cannot be read"),
        (_no_file, "shard-0.safetensors cannot be read"),
        (_cut_short, "has 5 bytes of"),
        (_exchanged, "0000000001.delta is not the version that .*0000000002.delta changes"),
        (_other_number, "is of 0000000002.delta, not of 0000000001.delta"),
        (_newest_is_damaged, "0000000002.delta"),
        (_pipe, "is no regular file"),
    ],
)
def test_what_is_not_whole_has_no_route_until_there_is_a_newer_base(
    tmp_path: Path, harm: Callable[[list[Version]], None], text: str
) -> None:
    versions = _fill(tmp_path, "bdd")
    harm(versions)
    with pytest.raises(DamagedCheckpointError, match=text):
        Chain.open(tmp_path).route()
    with ChainWriter(tmp_path) as writer:
        assert writer.needs_base
        base, delta = _commit(writer, Kind.BASE), _commit(writer, Kind.DELTA)
    chain = Chain.open(tmp_path)
    assert chain.route() == chain.route(versions[0]) == (base, delta)


def test_bytes_are_checked_when_a_file_is_asked_for(tmp_path: Path) -> None:
    (version,) = _fill(tmp_path, "b")
    for name in version.files:
        for at in range(0, version.files[name].bytes, 7):
            flip(version.folder / name, at)
            with pytest.raises(DamagedCheckpointError, match="its checksum is"):
                version.path(name)
            with pytest.raises(DamagedCheckpointError):
                version.verify()
            flip(version.folder / name, at)
    version.verify()


def _content(versions: tuple[Version, ...]) -> tuple[bytes, ...]:
    return tuple(
        version.path(name).read_bytes() for version in versions for name in sorted(version.files)
    )


def _ways(folder: Path) -> set[tuple[bytes, ...]]:
    """The content of the way to each version."""
    chain = Chain.open(folder)
    return {_content(chain.route(to=version)) for version in chain.versions()}


def _harm(dice: random.Random, folder: Path, other: Path) -> None:
    """Does something to a chain that a disk, a copy or a stranger might do."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    path, one = dice.choice(paths), dice.choice(folders)
    match dice.randrange(8):
        case 0 if path.stat().st_size:
            flip(path, dice.randrange(path.stat().st_size))
        case 1:
            os.truncate(path, dice.randrange(path.stat().st_size + 1))
        case 2:
            path.unlink()
        case 3:
            path.write_bytes(path.read_bytes() + dice.randbytes(3))
        case 4:
            shutil.copyfile(dice.choice(paths), path)
        case 5:
            shutil.rmtree(one)
        case 6:
            one.rename(folder / f"{dice.randrange(6):010}.{dice.choice(('base', 'delta'))}x")
        case _:
            found = dice.choice([each for each in other.iterdir() if each.is_dir()])
            shutil.copytree(found, folder / found.name, dirs_exist_ok=True)


@pytest.mark.parametrize("seeds", [range(n, n + 20) for n in range(0, 60, 20)])
def test_whatever_happens_to_its_folder_a_chain_is_read_as_it_was_or_refused(
    tmp_path: Path, seeds: range
) -> None:
    begun = _fill(tmp_path / "chain", "bdbdd")[1]
    _fill(tmp_path / "other", "bddb")
    mine, other = _ways(tmp_path / "chain"), _ways(tmp_path / "other")
    refused = 0
    for seed in seeds:
        dice, folder = random.Random(seed), tmp_path / f"{seed}"
        shutil.copytree(tmp_path / "chain", folder)
        for _ in range(dice.randrange(1, 3)):
            _harm(dice, folder, tmp_path / "other")
        try:
            chain = Chain.open(folder)
            assert _content(chain.route()) in mine | other | {()}, f"seed {seed}"
            assert _content(chain.route(replace(begun, folder=folder))) in mine, f"seed {seed}"
        except CheckpointError:
            refused += 1
    assert 0 < refused < len(seeds)


def test_readers_find_whole_versions_while_they_are_written_and_removed(tmp_path: Path) -> None:
    over = threading.Event()
    wrong: list[object] = []

    def read() -> None:
        while not over.is_set():
            try:
                way = Chain.open(tmp_path).route()
                found = _content(way)
            except (DamagedCheckpointError, FileNotFoundError):  # removed between two looks
                continue
            if not way:
                continue  # the first one is not written yet
            numbers = [int(each.rpartition(b" ")[2]) for each in found[::2]]
            if numbers != _numbers(way) or way[0].kind is not Kind.BASE:
                wrong.append(way)

    with ChainWriter(tmp_path, keep_bases=1) as writer:
        _commit(writer, Kind.BASE)
        reader = threading.Thread(target=read)
        reader.start()
        for number in range(30):
            _commit(writer, Kind.DELTA if number % 4 else Kind.BASE)
        over.set()
        reader.join()
    assert not wrong
