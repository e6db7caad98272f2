"""Workers that are forked off a template do not differ from those that a command starts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tensorwire.launch.becoming import Order
from tensorwire.launch.template import ForkedProcess, Template, TemplateLostError
from tests.processes import ready_made
from tests.tensorwire.launch.jobs import PROGRAMS, SECONDS, Job, job
from tests.waiting import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("process_server"),
    pytest.mark.xdist_group("launch"),
]

_OF_ONE_START = {"MASTER_PORT", "RPC_INIT_METHOD", "RPC_GROUP_KEY_FILE", "TORCHELASTIC_RUN_ID"}
_OF_ONE_START |= {"TORCHELASTIC_ERROR_FILE", "PET_START_METHOD", "RPC_ENDING_FILE", "RPC_WATCH"}


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Job]:
    with job(tmp_path) as made:
        yield made


def begun(work: Job, method: str, threads: str) -> dict[str, Any]:
    """The state with which the two workers of such a job begin."""
    agent = work.start(
        *("--standalone", "--role", "trainer:2", "--monitor-interval", "0.05"),
        *("--virtual-local-rank", str(PROGRAMS / "compared.py"), str(work.folder)),
        PET_START_METHOD=method,
        OMP_NUM_THREADS=threads,
    )
    assert agent.wait() == 0, agent.said
    return {
        name: json.loads((work.folder / f"{name}.json").read_text())
        for name in ("trainer:0", "trainer:1")
    }


@pytest.mark.parametrize("threads", ["1", "2"])
def test_spawned_and_forked_workers_begin_alike(threads: str, work: Job) -> None:
    spawned, forked = begun(work, "spawn", threads), begun(work, "fork", threads)
    for name in ("trainer:0", "trainer:1"):
        for found in (spawned[name], forked[name]):
            for variable in _OF_ONE_START:
                found["environment"].pop(variable, None)
        numbers = {each: (spawned[name].pop(each), forked[name].pop(each)) for each in ["random"]}
        assert forked[name] == spawned[name]
        assert forked[name]["threads"] == int(threads)
        assert forked[name]["environment"]["CUDA_VISIBLE_DEVICES"] == name[-1]
        assert not set(numbers["random"][0]) & set(numbers["random"][1])
    again = begun(work, "fork", threads)
    states = [again[name]["random"] for name in ("trainer:0", "trainer:1")]
    assert not set(states[0]) & set(states[1]), "workers draw the same numbers"


_PROGRAMS = {
    "well": ("import sys; sys.exit()", 0, ""),
    "number": ("import sys; sys.exit(300)", 300 & 0xFF, ""),
    "text": ("import sys; sys.exit('no data')", 1, "no data\n"),
    "error": ("def f():\n    return 1 / 0\nf()", 1, "ZeroDivisionError: division by zero\n"),
    "interrupt": ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt\n"),
    "killed": ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    "exit": ("import os; os._exit(7)", 7, ""),
    "late": (
        "import atexit, sys, threading, time\n"
        "atexit.register(lambda: print('last', file=sys.stderr))\n"
        "threading.Thread(target=lambda: print('joined', file=sys.stderr)).start()",
        0,
        "joined\nlast\n",
    ),
}


def ends_of(folder: str) -> None:
    """Runs each program as a worker of a template, in a process without threads."""
    template, ends = Template(), {}
    for name in _PROGRAMS:
        files = f"{folder}/{name}.out", f"{folder}/{name}.err"
        process = template.start(Order(dict(os.environ), (f"{folder}/{name}.py",), *files))
        ends[name] = process.wait(SECONDS)
    template.close()
    Path(folder, "ends.json").write_text(json.dumps(ends))


def in_a_process(function: Callable[[str], None], folder: Path) -> None:
    process = ready_made().Process(target=function, args=(str(folder),))
    process.start()
    process.join(SECONDS)
    assert process.exitcode == 0
    process.close()


def test_a_forked_program_ends_as_python_would_end_it(tmp_path: Path) -> None:
    for name, (text, _, _) in _PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(text)
    in_a_process(ends_of, tmp_path)
    ends = json.loads((tmp_path / "ends.json").read_text())
    assert ends == {name: code for name, (_, code, _) in _PROGRAMS.items()}
    said = {name: (tmp_path / f"{name}.err").read_text() for name in _PROGRAMS}
    assert {
        name: text for name, text in said.items() if not text.endswith(_PROGRAMS[name][2])
    } == {}
    first = said["error"].splitlines()[1]
    assert first == f'  File "{tmp_path}/error.py", line 3, in <module>'


def outlives(folder: str) -> None:
    """A worker goes on when its template is killed, and is still its agent's child."""
    template = Template()
    waits = Path(folder, "waits.py")
    waits.write_text("import os, sys\nos.read(0, 1)\nprint('read', os.getppid())")
    read, write = os.pipe()
    os.dup2(read, 0)
    late = Template()  # with the pipe for its standard input
    process = late.start(Order(dict(os.environ), (str(waits),), f"{folder}/said"))
    os.kill(late.process, signal.SIGKILL)
    until(lambda: refuses(late), SECONDS)
    assert process.poll() is None
    os.write(write, b"x")
    assert process.wait(SECONDS) == 0
    assert Path(folder, "said").read_text() == f"read {os.getpid()}\n"
    template.close()
    assert refuses(template)


def refuses(template: Template) -> bool:
    order = Order(dict(os.environ), ("-c", "pass"))
    try:
        template.start(order).wait(SECONDS)
    except TemplateLostError:
        return True
    return False


def test_workers_outlive_their_template(tmp_path: Path) -> None:
    in_a_process(outlives, tmp_path)


def test_the_end_of_somebody_elses_process_is_not_waited_for() -> None:
    assert ForkedProcess(os.getppid()).wait(SECONDS) == 1
