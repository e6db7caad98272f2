"""The fixture that fails leaking tests: it must catch each kind, and nothing else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="looks at processes through /proc"),
]

pytest_plugins = ["pytester"]

_LEAKY = """
import _thread, socket, subprocess, threading
from pathlib import Path

kept = []


def test_leaks_one_of_each():
    done = threading.Event()
    thread = threading.Thread(target=done.wait, name="left-thread", daemon=True)
    thread.start()
    Path("/dev/shm/{segment}").touch()
    kept.extend([done, thread, socket.socket(), subprocess.Popen(["sleep", "60"])])


def test_cleans_up(tmp_path):
    with (tmp_path / "file").open("w") as file:
        file.write("x")
    thread = threading.Thread(target=lambda: None)
    thread.start()


def test_entry_of_a_foreign_thread_that_has_ended():
    done = threading.Event()
    _thread.start_new_thread(lambda: (threading.current_thread(), done.set()), ())
    done.wait()


def test_foreign_thread_that_runs():
    begun, may_end = threading.Event(), threading.Event()
    run = lambda: (threading.current_thread(), begun.set(), may_end.wait())
    _thread.start_new_thread(run, ())
    begun.wait()
    kept.insert(1, may_end)


def test_nothing_is_blamed_on_a_later_test():
    for thing in kept:
        if isinstance(thing, subprocess.Popen):
            thing.kill()
            thing.wait()
        if isinstance(thing, socket.socket):
            thing.close()
    kept[0].set()
    kept[1].set()
    Path("/dev/shm/{segment}").unlink()
"""


def test_each_kind_of_leak_fails_only_the_test_that_leaked(pytester: pytest.Pytester) -> None:
    segment = f"left_segment_{os.getpid()}"
    fixture = Path(__file__).with_name("conftest.py").read_text()
    pytester.makeconftest(fixture.replace("_SECONDS_TO_SETTLE = 3.0", "_SECONDS_TO_SETTLE = 1.0"))
    pytester.makepyfile(_LEAKY.replace("{segment}", segment))
    ours = f"pythonpath={Path(__file__).parents[1]}"  # the fixture's module imports from tests/
    result = pytester.runpytest_subprocess("-p", "no:xdist", "-p", "no:cacheprovider", "-o", ours)
    result.assert_outcomes(passed=5, errors=2)
    result.stdout.fnmatch_lines(["*ERROR at teardown of test_leaks_one_of_each*"])
    for kind in (
        "left-thread",
        "_DummyThread",
        "-> socket:",
        "sleep 60",
        f"shared memory /dev/shm/{segment}",
    ):
        result.stdout.fnmatch_lines([f"*{kind}*"])
