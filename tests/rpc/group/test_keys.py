"""A group's key is read from the environment; what is no key is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rpc.group.keys import read_group_key, read_key_file, share_group_key

KEY = b"0123456789abcdef"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    return path


def test_without_a_variable_there_is_no_key() -> None:
    assert read_group_key({}) == b""
    assert read_group_key({"RPC_GROUP_KEY_FILE": "", "RPC_GROUP_KEY_FD": ""}) == b""


def test_the_line_end_of_a_file_is_no_part_of_the_key(key_file: Path) -> None:
    assert read_group_key({"RPC_GROUP_KEY_FILE": str(key_file)}) == KEY


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_file_that_others_may_touch_is_refused(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}.*chmod 600") as refused:
        read_key_file(str(key_file))
    assert KEY.decode() not in str(refused.value)


def test_a_file_that_is_not_there_or_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"the key file '.*none' cannot be read: No such file"):
        read_key_file(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="is not a regular file"):
        read_key_file(str(tmp_path))


@pytest.mark.parametrize("size", [0, 15, 4097])
def test_a_key_of_another_length_is_refused_and_not_shown(key_file: Path, size: int) -> None:
    key_file.write_bytes(b"k" * size)
    with pytest.raises(ValueError, match=f"holds {size} bytes") as refused:
        read_key_file(str(key_file))
    assert "kk" not in str(refused.value)


def test_a_shared_key_is_read_as_often_as_wanted_and_goes_before_the_file(key_file: Path) -> None:
    shared = share_group_key(b"\n another key, with a line end \n")
    try:
        os.set_inheritable(shared, True)
        variables = {"RPC_GROUP_KEY_FD": str(shared), "RPC_GROUP_KEY_FILE": str(key_file)}
        for _ in range(2):
            assert read_group_key(variables) == b"\n another key, with a line end \n"
        assert not os.get_inheritable(shared), "programs that a worker starts would get it too"
    finally:
        os.close(shared)


@pytest.mark.parametrize(
    ("number", "told"),
    [("x", "is not the number"), ("-1", "is no descriptor"), ("99999999999999", "is not the")],
)
def test_what_is_no_descriptor_is_named(number: str, told: str) -> None:
    with pytest.raises(ValueError, match=f"RPC_GROUP_KEY_FD='{number}' {told}"):
        read_group_key({"RPC_GROUP_KEY_FD": number})


def test_a_pipe_is_refused_because_it_can_be_read_only_once() -> None:
    reading, writing = os.pipe()
    try:
        with pytest.raises(ValueError, match="is no descriptor of a file: it is not"):
            read_group_key({"RPC_GROUP_KEY_FD": str(reading)})
    finally:
        os.close(reading)
        os.close(writing)
