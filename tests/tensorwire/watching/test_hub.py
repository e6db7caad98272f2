"""The hub of an agent asks its workers; views, jobs and agents' values are what they were."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket
import tempfile
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tensorwire.watching import jobs, terminal
from tensorwire.watching import watch as watching
from tensorwire.watching.exchange import AgentReport, Exchange
from tensorwire.watching.hub import Hub, NoAnswerError, Viewer
from tensorwire.watching.jobs import JobNotFoundError, RunningJob, find_job
from tensorwire.watching.views import JobView, NodeView, ProcessView, WorkerView
from tensorwire.watching.watch import JobWatch, Seen, StallPolicy
from tests.waiting import until


@pytest.fixture(autouse=True)
def _agents_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tensorwire.watching.watch.SECONDS_BETWEEN_LOOKS", 0.1)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # short enough for a socket
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder)


@contextmanager
def answering(path: str, name: str, told: Mapping[str, Any]) -> Iterator[None]:
    """A worker that answers every question with what ``told`` has for it."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    connection.sendall(json.dumps({"name": name, "pid": os.getpid()}).encode() + b"\n")

    def serve() -> None:
        with connection.makefile("rb") as lines:
            for line in lines:
                question = json.loads(line)
                answer = {"number": question["number"], "answer": told.get(question["ask"])}
                if question["ask"] not in told:
                    answer = {"number": question["number"], "error": "it does not know"}
                connection.sendall(json.dumps(answer).encode() + b"\n")

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        connection.shutdown(socket.SHUT_RDWR)
        thread.join()
        connection.close()


class Values:
    """A store that two agents share."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.written = 0
        self.read: Counter[str] = Counter()

    def set(self, key: str, value: bytes) -> None:
        self.written += 1
        self.kept[key] = value

    def get(self, key: str) -> bytes | None:
        self.read[key] += 1
        return self.kept.get(key)


FACTS: dict[str, Any] = {
    "progress": {"steps": 7, "age": 0.1, "phase": "", "phase_age": 0.0, "longest": 0.1},
    "made": [],
}


def test_workers_are_asked_and_one_that_is_silent_holds_nobody_up(tmp_path: Path) -> None:
    hub = Hub(str(tmp_path / "hub"), lambda question: {"seen": question["ask"]})
    hub.start()
    try:
        with answering(hub.path, "a:0", {"facts": FACTS}), socket.socket(socket.AF_UNIX) as silent:
            silent.connect(hub.path)
            silent.sendall(b'{"name": "b:0", "pid": 1}\n')
            until(lambda: set(hub.pids()) == {"a:0", "b:0"}, 30)
            answers = hub.facts(["a:0", "b:0", "c:0"], 0.5)
            assert answers == {"a:0": FACTS}
            assert hub.facts(["a:0", "b:0"], 60) == {"a:0": FACTS}  # b:0 is not waited for again
            silent.sendall(b'{"number": 0, "answer": {}}\n')
            until(lambda: "b:0" in hub.facts(["b:0"], 0), 30)
            for _ in range(100):  # as many unanswered ones would fill a socket, and hold up the hub
                hub.facts(["b:0"], 0)
            with pytest.raises(NoAnswerError, match="b:0 has not answered within"):
                hub.ask("b:0", {"ask": "stacks"}, 0.01)
            for _ in range(20):
                with contextlib.suppress(NoAnswerError):
                    hub.ask("b:0", {"ask": "stacks"}, 0)
            with pytest.raises(NoAnswerError, match="b:0 has not answered 16 questions"):
                hub.ask("b:0", {"ask": "stacks"}, 60)
            with pytest.raises(NoAnswerError, match="a:0: it does not know"):
                hub.ask("a:0", {"ask": "stacks"}, 10)
            with pytest.raises(NoAnswerError, match="c:0 has not called init_rpc"):
                hub.ask("c:0", {"ask": "stacks"}, 10)
        with Viewer(hub.path) as viewer:
            assert viewer.ask({"ask": "job"}) == {"seen": "job"}
    finally:
        hub.close()
    assert not os.path.exists(hub.path)


@pytest.mark.parametrize("first", [b"[]\n", b"\xff\xfe\n", b'{"pid": 1}\n', b"{" * 5000 + b"\n"])
def test_whoever_does_not_say_who_he_is_is_hung_up_on(tmp_path: Path, first: bytes) -> None:
    hub = Hub(str(tmp_path / "hub"), lambda question: None)
    hub.start()
    try:
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(30)
            stranger.connect(hub.path)
            stranger.sendall(first)
            assert stranger.recv(1) == b""
        assert hub.pids() == {}
    finally:
        hub.close()


def test_a_view_comes_back_from_its_bytes_and_garbage_is_refused() -> None:
    process = ProcessView(1, "S", 0.5, 4096, 3)
    workers = (WorkerView("a:0", "a", 0, 1, "runs", 0, "host", "", process, FACTS, 0.0),)
    view = JobView("j", "running", 1.5, (NodeView(0, "host"),), workers, ("alarm",), ("news",))
    assert JobView.decode(view.encode()) == view
    for garbage in (b"{}", b"[]", b"nothing", b'{"job": 1, "phase": 2, "now": "x"}'):
        with pytest.raises(ValueError):  # noqa: PT011  (json's own, or ours)
            JobView.decode(garbage)


def test_what_workers_tell_has_no_power_over_a_terminal() -> None:
    facts = {"progress": {"steps": 1, "phase": "\x1b[2J\x07 évaluation"}}
    worker = WorkerView("a:0", "a", 0, 1, "runs", 0, "host", "", None, facts)
    view = JobView("j", "running", 1.0, (NodeView(0, "host"),), (worker,), ("\x1b]0;title\x07",))
    console = Console(file=io.StringIO(), width=200)
    console.print(terminal.table(view, {}))
    assert isinstance(console.file, io.StringIO)
    for text in (terminal.plain(view), console.file.getvalue()):
        assert not {"\x1b", "\x07"} & set(text)
        assert "évaluation" in text


def test_jobs_are_found_and_what_a_killed_agent_left_is_passed_over() -> None:
    path = jobs.socket_path("job/one")
    Path(path).touch()
    assert find_job(None) == RunningJob("job/one", os.getpid(), path)
    assert find_job("job/o").path == path
    left = jobs.home() / f"{2**22 + 1}-gone"
    left.mkdir()
    (left / "job").write_text("gone")
    (left / "sock").touch()
    assert [job.job for job in jobs.running_jobs()] == ["job/one"]
    assert not left.exists()
    with pytest.raises(JobNotFoundError, match=r"no job 'other' .* there are: job/one"):
        find_job("other")
    jobs.forget(path)
    with pytest.raises(JobNotFoundError, match=r"no job of this user runs .* there are: none"):
        find_job(None)


def test_a_folder_that_others_may_enter_is_refused(home: Path) -> None:
    (home / f"tensorwire-{os.getuid()}").mkdir(mode=0o755)
    (home / f"tensorwire-{os.getuid()}").chmod(0o755)
    with pytest.raises(PermissionError, match="must be a folder of this user's of mode 0700"):
        jobs.running_jobs()


def test_garbage_and_earlier_values_are_passed_over() -> None:
    values = Values()
    mine, other = (Exchange(values, node) for node in (0, 1))
    other.write(lambda number: AgentReport(number, alarms=("first",)))
    early = values.kept["watch/1"]
    assert mine.read([1])[1].alarms == ("first",)
    other.write(lambda number: AgentReport(number, alarms=("second",)))
    assert mine.read([1])[1].alarms == ("second",)
    for value in (early, b"", b"\xff" * 100, zlib.compress(b"[" * 100_000), zlib.compress(b"{}")):
        values.kept["watch/1"] = value
        assert mine.read([1])[1].alarms == ("second",)


def _seen(local: str, pid: int) -> Seen:
    workers = tuple(
        WorkerView(f"{role}:0", role, number, 1, "runs", number, f"host{number}")
        for number, role in enumerate(("ps", "trainer"))
    )
    nodes = (NodeView(0, "host0"), NodeView(1, "host1"))
    return Seen("running", nodes, workers, {local: pid}, {})


TwoAgents = Callable[..., AbstractContextManager[tuple[JobWatch, JobWatch]]]


@pytest.fixture
def two_agents(monkeypatch: pytest.MonkeyPatch, home: Path) -> TwoAgents:
    """Watches one job from two machines, each with a folder of sockets of its own."""

    @contextmanager
    def watch(values: Values, policy: StallPolicy) -> Iterator[tuple[JobWatch, JobWatch]]:
        first = JobWatch("j", 0, values, policy)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(home / "other"))
        (home / "other").mkdir()
        second = JobWatch("j", 1, values, policy)
        try:
            yield first, second
        finally:
            first.close()
            second.close()

    return watch


def test_one_agent_shows_the_workers_of_all_machines_and_asks_the_others_for_theirs(
    two_agents: TwoAgents,
) -> None:
    values, policy = Values(), StallPolicy(0)
    with two_agents(values, policy) as (first, second):
        told = {"facts": FACTS, "stacks": "in train()"}
        with answering(second.path, "trainer:0", told):
            first.update(_seen("ps:0", os.getpid()))
            second.update(_seen("trainer:0", os.getpid()))

            def steps() -> object:
                worker = next(w for w in first.view().workers if w.name == "trainer:0")
                return worker.facts and worker.facts["progress"]["steps"]

            until(lambda: steps() == 7, 60, 0.1)
            assert first.answer({"ask": "stacks", "worker": "trainer:0"}) == "in train()"
            with pytest.raises(NoAnswerError, match="no worker 'trainr:0' in this job; there are"):
                first.answer({"ask": "stacks", "worker": "trainr:0"})
            with pytest.raises(NoAnswerError, match="start rpcrun with --tee 3"):
                first.answer({"ask": "log", "worker": "trainer:0"})


def test_agents_write_nothing_while_nobody_looks_and_one_view_has_the_facts_of_all(
    two_agents: TwoAgents,
) -> None:
    values, policy = Values(), StallPolicy(0)
    told = {"facts": FACTS}
    with two_agents(values, policy) as (first, second), answering(second.path, "trainer:0", told):
        first.update(_seen("ps:0", os.getpid()))
        second.update(_seen("trainer:0", os.getpid()))
        until(lambda: values.read["watch/call"] >= 4, 60, 0.1)
        assert (values.written, dict(values.read)) == (0, {"watch/call": values.read.total()})

        worker = next(w for w in first.view().workers if w.name == "trainer:0")
        assert worker.facts == FACTS
        assert values.written > 0


def test_a_worker_of_another_machine_is_started_again_by_its_agent(
    two_agents: TwoAgents,
) -> None:
    """The agent that finds the standstill asks until the other one knows, and then no more."""
    values, policy = Values(), StallPolicy(0.5, at_once=True, restarts=True)
    with two_agents(values, policy) as (first, second):
        told = {"facts": {"progress": {**FACTS["progress"], "age": 9.0}}, "stacks": "in train()"}
        with answering(second.path, "trainer:0", told):
            first.update(_seen("ps:0", os.getpid()))
            second.update(_seen("trainer:0", os.getpid()))
            until(lambda: second.to_restart() == {("trainer:0", 1)}, 60, 0.1)
            until(lambda: not json.loads(zlib.decompress(values.kept["watch/0"]))["questions"], 60)


def test_a_viewer_that_comes_before_the_watch_is_ready_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[object] = []

    class Eager(Hub):
        def start(self) -> None:
            super().start()
            with Viewer(self.path) as viewer:
                told.append(viewer.ask({"ask": "job"}))

    monkeypatch.setattr(watching, "Hub", Eager)
    JobWatch("j", 0, Values(), StallPolicy(0)).close()
    (job,) = told
    assert isinstance(job, dict)
    assert job["job"] == "j"


def test_a_worker_that_starts_again_is_news_with_the_reason() -> None:
    watch = JobWatch("j", 0, Values(), StallPolicy(0))
    try:
        worker = WorkerView("a:0", "a", 0, 1, "runs", 0, "host", "ended with signal SIGKILL")
        node = (NodeView(0, "host"),)
        watch.update(Seen("running", node, (worker,), {}, {}))
        again = WorkerView("a:0", "a", 0, 2, "runs", 0, "host", "ended with signal SIGKILL")
        watch.update(Seen("running", node, (again,), {}, {}))
        news = watch.view().news
    finally:
        watch.close()
    assert news == ("a:0 started again, as life 2: ended with signal SIGKILL",)
