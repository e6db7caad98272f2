"""For every test: what it started must be gone when it ends.

One fixture compares this process before and after each test and fails the test
that left a Python thread, an open file descriptor, a child process or a
shared-memory file behind. Whatever a library starts once and keeps for good is
started before the first test, so that it never looks like a leak.
"""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from torch.distributed import TCPStore

import rpc
from rpc.transports.base import Transport
from rpc.transports.tensorwire import TensorWireTransport
from tensorwire._about import modules
from tests.processes import ready_made

# A slow example on a busy machine is no finding. Many examples: --hypothesis-profile thorough
settings.register_profile("tensorwire", deadline=None, max_examples=40)
settings.register_profile("thorough", deadline=None, max_examples=1000)
settings.load_profile("tensorwire")

# Tests start hundreds of processes, each of which would compile every module anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

_IS_COMPILED = os.environ.get("COMPILED") == "1"
_USUAL_KILLS = 3
_SECONDS_TO_SETTLE = 3.0
_SECONDS_BETWEEN_LOOKS = 0.02
_SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Holdings:
    """The things a process holds that outlive a function call."""

    threads: frozenset[threading.Thread]
    descriptors: frozenset[tuple[str, str]]
    descendants: frozenset[str]
    segments: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        """Look at this process."""
        return cls(_threads(), _descriptors(), _descendants(), frozenset(_segments()))

    def since(self, before: Holdings) -> list[str]:
        """Describe what is held now and was not held ``before``."""
        threads = (repr(thread) for thread in self.threads - before.threads)
        descriptors = (
            f"file descriptor {number} -> {target}"
            for number, target in self.descriptors - before.descriptors
        )
        processes = (
            _describe_process(process) for process in self.descendants - before.descendants
        )
        segments = (
            f"shared memory {_SHARED_MEMORY / name}"
            for name in self.segments - before.segments
            if not _held_by_someone_else(name)
        )
        return sorted([*threads, *descriptors, *processes, *segments])


def pytest_addoption(parser: pytest.Parser) -> None:
    """``make kills`` repeats tests that kill processes at random moments more often."""
    parser.addoption(
        "--kills", type=int, default=_USUAL_KILLS, help="how often such a test kills (%(default)s)"
    )


def pytest_configure() -> None:
    """Refuse compiled modules that nobody asked for: they may be older than the sources."""
    root = Path(rpc.__file__).parents[1]
    _, compiled = modules(root)
    if compiled and not _IS_COMPILED:
        which = f"{compiled[0]} and {len(compiled) - 1} others in {root}"
        pytest.exit(f"remove {which}: they are compiled, and hide their sources", 4)
    if _IS_COMPILED and not compiled:
        pytest.exit(f"nothing in {root} is compiled: make test COMPILED=1 builds what is tested", 4)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give all tests of a file, or of a group, to one process: what they share is made once.

    One by one they also cost the process that hands them out a millisecond each.
    """
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class _ByFile(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return str(super()._split_scope(nodeid)).partition("::")[0]

    return _ByFile(config, log)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that replace what a compiled module does not look up."""
    if _IS_COMPILED and item.get_closest_marker("interpreted") is not None:
        pytest.skip("replaces what compiled modules do not look up when they run")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that takes ``kill_seed`` as often as was said, with another seed each time.

    ``@pytest.mark.kills(20)`` says that twenty times are enough, and ``usual=1`` that one is
    elsewhere than under ``make kills``, ``usual=0`` that none is.
    """
    if "kill_seed" in metafunc.fixturenames:
        asked = times = metafunc.config.getoption("--kills")
        for mark in metafunc.definition.iter_markers("kills"):
            times = min([times, *mark.args])
            if asked <= _USUAL_KILLS:
                times = min(times, mark.kwargs.get("usual", times))
        metafunc.parametrize("kill_seed", range(times))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say of each kind of kill how many there were, and how many found nothing.

    A test that does a thing several times says so, ``record_property("times", 50)``, and by any
    other name what it has measured, of which the largest is told.
    """
    passed: Counter[str] = Counter()
    times: Counter[str] = Counter()
    largest: dict[str, dict[str, float]] = {}
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, ()):
            if report.when == "call" and "kills" in report.keywords:
                name = re.split(r"[\[@]", report.nodeid.rpartition("::")[2])[0]
                found = {"times": 1, **dict(report.user_properties)}
                times[name] += found["times"]
                passed[name] += found["times"] if outcome == "passed" else 0
                del found["times"]
                told = largest.setdefault(name, {})
                for what, value in found.items():
                    told[what] = max(value, told.get(what, value))
    if times:
        terminalreporter.section("killed, or done at full length")
    for name in sorted(times):
        words = name.removeprefix("test_").replace("_", " ")
        numbers = "".join(f"; {what}: {value:.2f}" for what, value in largest[name].items())
        terminalreporter.write_line(f"{passed[name]:6} of {times[name]:6}  {words}{numbers}")


@pytest.fixture
def full_length(request: pytest.FixtureRequest) -> bool:
    """True under ``make kills``, where the machine is quiet enough for measuring time, too."""
    return bool(request.config.getoption("--kills") > _USUAL_KILLS)


@pytest.fixture(scope="session", autouse=True)
def _lasting_helpers() -> None:
    """Start what starts once and stays in a process that uses it."""
    multiprocessing.resource_tracker.ensure_running()
    TCPStore("127.0.0.1", 0, is_master=True)  # its event library keeps a pipe
    weights = torch.ones(256, 256, requires_grad=True)
    torch.autograd.grad((weights @ weights).sum(), weights)


@pytest.fixture(scope="session")
def process_server() -> None:
    """Start what makes the processes of tests, before one that uses it begins."""
    ready_made()
    multiprocessing.forkserver.ensure_running()


@pytest.fixture(scope="session", autouse=True)
def _collections_are_short(_lasting_helpers: None) -> None:
    """Keep the collector from looking, time and again, at all that was imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _heard_of_beta_features() -> None:
    """Torch warns of these once per process: not in whichever test happens to come first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_coo_tensor([[0]], [1.0], (1,))
        torch.ones(1, 1).to_sparse_csr()


@pytest.fixture(autouse=True)
def _nothing_is_left_behind(
    request: pytest.FixtureRequest, _lasting_helpers: None
) -> Iterator[None]:
    if "nothing_is_left_by_module" in request.fixturenames:
        yield
        return
    before = Holdings.now()
    yield
    _fail_if_left(before)


@pytest.fixture(scope="module")
def nothing_is_left_by_module(_lasting_helpers: None, process_server: None) -> Iterator[None]:
    """For tests that share processes which some of them replace: look after the last one."""
    before = Holdings.now()
    yield
    _fail_if_left(before)


def _fail_if_left(before: Holdings) -> None:
    left = _left_after_settling(before)
    if left:
        pytest.fail("the test left behind:\n  " + "\n  ".join(left), pytrace=False)


def _left_after_settling(before: Holdings) -> list[str]:
    """Return what stays held, after giving what is just ending a moment to end."""
    if not (left := Holdings.now().since(before)):
        return left
    gc.collect()  # what only a reference cycle still holds is not a leak
    deadline = time.monotonic() + _SECONDS_TO_SETTLE
    while (left := Holdings.now().since(before)) and time.monotonic() < deadline:
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return left


def _threads() -> frozenset[threading.Thread]:
    """The threads that run Python.

    One that logs in its last moments, as it lets go of a value, leaves an entry that stays.
    """
    running = sys._current_frames()
    return frozenset(
        thread
        for thread in threading.enumerate()
        if not isinstance(thread, threading._DummyThread) or thread.ident in running
    )


def _descriptors() -> frozenset[tuple[str, str]]:
    links = Path("/proc/self/fd")
    if not links.exists():
        return frozenset()
    found = set()
    for number in os.listdir(links):
        try:
            found.add((number, os.readlink(links / number)))
        except FileNotFoundError:  # the one that listed the folder
            continue
    return frozenset(found)


def _descendants() -> frozenset[str]:
    found: set[str] = set()
    unseen = ["self"]
    while unseen:
        tasks = f"/proc/{unseen.pop()}/task"
        try:
            children = {child for task in os.listdir(tasks) for child in _children(tasks, task)}
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile, or not on Linux
            continue
        unseen.extend(children - found)
        found |= children
    return frozenset(found)


def _children(tasks: str, task: str) -> list[str]:
    try:
        with open(f"{tasks}/{task}/children", "rb") as listing:
            return listing.read().decode().split()
    except (FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile
        return []


def _segments() -> list[str]:
    """The files in shared memory, but for semaphores of ``multiprocessing`` and joblib.

    Those are unlinked by themselves, when the last process that knows them has ended: often another
    test's, or another program's.
    """
    names = os.listdir(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else []
    return [name for name in names if not name.startswith(("sem.mp-", "sem.loky-"))]


def _describe_process(process: str) -> str:
    try:
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
    except FileNotFoundError:
        command = b"just ended"
    return f"child process {process}: {command.decode(errors='replace').strip()}"


def _held_by_someone_else(segment: str) -> bool:
    """True if a process that is not ours has the shared-memory file open or mapped."""
    path = str(_SHARED_MEMORY / segment)
    ours = {str(os.getpid()), *_descendants()}
    return any(
        process.name not in ours and _holds(process, path)
        for process in Path("/proc").glob("[0-9]*")
    )


def _holds(process: Path, path: str) -> bool:
    try:
        if path in (process / "maps").read_text():
            return True
        return any(os.readlink(link) == path for link in (process / "fd").iterdir())
    except OSError:  # it ended, or it is not ours to look at
        return False


@pytest.fixture(params=["memory", "tensorwire"])
def make_transport(request: pytest.FixtureRequest) -> Callable[[], Transport] | None:
    """The maker of the transports of a group in this process; None means in memory."""
    return TensorWireTransport if request.param == "tensorwire" else None
