"""The key of a job's group."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import pytest

from tensorwire.launch.group_key import GroupKeyError, choose_key


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path


def test_agents_of_one_machine_and_job_share_a_key_that_nobody_else_can_read(runtime: Path) -> None:
    first = choose_key(None, "job7", True, False)
    second = choose_key(None, "job7", True, False)
    other = choose_key(None, "job8", True, False)
    assert (first.path, first.is_ours, second.is_ours) == (second.path, True, False)
    assert first.read() == second.read() != other.read()
    assert len(first.read()) == 64
    assert stat.S_IMODE(Path(first.path).stat().st_mode) == 0o600
    assert len(list(runtime.iterdir())) == 2


def test_a_key_file_is_used_where_it_is(runtime: Path) -> None:
    file = runtime / "key"
    file.write_text("0123456789abcdef\n")
    file.chmod(0o600)
    key = choose_key(str(file), "job7", False, False)
    assert (key.path, key.is_ours, key.read()) == (str(file), False, b"0123456789abcdef")


def test_a_key_that_others_can_read_is_refused(runtime: Path) -> None:
    file = runtime / "key"
    file.write_text("0123456789abcdef")
    file.chmod(0o644)
    with pytest.raises(GroupKeyError, match=r"--group-key-file=.*0644.*chmod 600"):
        choose_key(str(file), "job7", False, False)


def test_beyond_this_machine_a_key_is_needed_unless_nobody_cares(runtime: Path) -> None:
    with pytest.raises(GroupKeyError, match="give each rpcrun --group-key-file key; or give --ins"):
        choose_key(None, "job7", False, False)
    assert choose_key(None, "job7", False, True).read() == b""


def test_files_that_another_user_made_beforehand_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A symbolic link, a folder and, where the test may make it so, another user's file."""
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "no home"))
    (tmp_path / "no home").touch()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    expected = Path(choose_key(None, "job7", True, False).path)
    expected.unlink()
    expected.symlink_to("/etc/hostname")
    Path(f"{expected}_1").mkdir()
    if os.geteuid() == 0:
        Path(f"{expected}_2").write_text("a key that somebody else knows")
        os.chown(f"{expected}_2", 65534, 65534)
    first = choose_key(None, "job7", True, False)
    second = choose_key(None, "job7", True, False)
    assert (first.path, first.is_ours, second.is_ours) == (second.path, True, False)
    assert not Path(first.path).is_symlink()
    assert len(first.read()) == 64


def test_the_key_lies_where_nobody_else_can_make_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    key = choose_key(None, "job7", True, False)
    assert Path(key.path).parent == tmp_path / ".cache"
    assert stat.S_IMODE(Path(key.path).parent.stat().st_mode) == 0o700
