"""A process that forks: what it received is its own, and what its child finds is the child's."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("forking")]

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    """The output of each scenario of ``forking_process``."""
    command = [sys.executable, "-m", "tests.rpc.transports.forking_process"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return dict(line.split(" ", 1) for line in ended.stdout.splitlines())


def test_the_child_keeps_what_the_parent_lets_go(seen: dict[str, str]) -> None:
    assert seen["parent_lets_go"] == "o n"


def test_what_the_child_writes_is_not_seen_in_the_parent(seen: dict[str, str]) -> None:
    assert seen["child_writes"] == "c o"


def test_the_parent_keeps_what_the_child_lets_go(seen: dict[str, str]) -> None:
    assert seen["child_lets_go"] == "dropped o"


def test_what_comes_while_a_thread_forks_is_copied(seen: dict[str, str]) -> None:
    assert seen["received_while_forking"] == "o o"


def test_what_dies_while_a_thread_forks_is_free_afterwards(seen: dict[str, str]) -> None:
    assert seen["dropped_while_forking"] == "lives True"


def test_the_parent_keeps_what_dies_in_the_child_before_all_else(seen: dict[str, str]) -> None:
    """Objects that other threads had in a ``threading.local`` die in such a way."""
    assert seen["dropped_early_in_child"] == "lives o"


def test_a_lock_that_another_thread_held_does_not_stop_the_child(seen: dict[str, str]) -> None:
    assert seen["locked_by_another_thread"] == "dropped"


def test_a_child_that_forks_shares_nothing_either(seen: dict[str, str]) -> None:
    assert seen["forked_twice"] == "o c"


def test_all_that_is_held_is_copied_to_its_place(seen: dict[str, str]) -> None:
    assert seen["two_arrays"] == "1 3"


def test_the_parent_gives_copies_back(seen: dict[str, str]) -> None:
    assert seen["copies_are_given_back"] == "True"


def test_the_child_gives_back_what_it_drops(seen: dict[str, str]) -> None:
    assert seen["child_frees_what_it_drops"] == "True"


def test_a_child_that_could_not_get_a_copy_crashes_rather_than_reads_what_is_not_its_own(
    seen: dict[str, str],
) -> None:
    assert seen["no_room_for_a_copy"] == f"lives, ended with {signal.SIGSEGV:d}, o"
