"""The key of a job's group."""

from __future__ import annotations

import stat
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
