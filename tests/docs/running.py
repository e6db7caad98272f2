"""Runs the blocks of a page in processes of their own: one for each worker that they need."""

from __future__ import annotations

import contextlib
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import rpc
from tests.docs.blocks import Block, Mode, Program, Session
from tests.free_ports import free_port
from tests.processes import ready_made

_SECONDS_FOR_A_PAGE = 110.0
_FORKED = ("--run-path", "--start-method", "fork")
"""Flags for workers that have torch imported, as their launcher has here."""
Task = Callable[[], None]


def run_session(session: Session, page: str, folder: Path) -> str:
    """Runs blocks in their processes; returns the first failure, empty if there is none."""
    names = session.setting.workers
    tasks = [functools.partial(_run_blocks, session, page, name) for name in names]
    surroundings = [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "LOCAL_RANK": str(rank),
            "LOCAL_WORLD_SIZE": str(len(names)),
            "RPC_BACKEND": "TENSORWIRE",
        }
        for rank in range(len(names))
    ]
    return _run(tasks, surroundings, folder)


def run_program(program: Program, folder: Path) -> tuple[str, str]:
    """Runs a program as its page starts it; returns the first failure, and what it printed."""
    file = folder / program.file
    file.write_text(program.code)
    outputs = [folder / f"output-{number}" for number in range(len(program.commands))]
    tasks = [
        functools.partial(_run_command, file, command.split(), output)
        for command, output in zip(program.commands, outputs, strict=True)
    ]
    failure = _run(tasks, [{"PYTHONPATH": os.getcwd()}] * len(tasks), folder)
    return failure, "".join(output.read_text() for output in outputs if output.exists())


def _run(tasks: Sequence[Task], surroundings: Sequence[Mapping[str, str]], folder: Path) -> str:
    """Runs each task in a process of its own; the first that fails ends the others."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes, results = [], []
    for task, environment in zip(tasks, surroundings, strict=True):
        result, send = multiprocessing.Pipe(duplex=False)
        arguments = (task, {**meeting, **environment}, folder, send)
        process = ready_made().Process(target=_perform, args=arguments)
        process.start()
        send.close()
        processes.append(process)
        results.append(result)
    failure = _first_failure(results)
    for process in processes:
        if failure:
            process.kill()
        process.join()
        process.close()
    for result in results:
        result.close()
    return failure


def _first_failure(results: Sequence[Connection]) -> str:
    deadline = time.monotonic() + _SECONDS_FOR_A_PAGE
    waiting = list(results)
    while waiting:
        ready = multiprocessing.connection.wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            number = results.index(waiting[0])
            return f"process {number} was not done after {_SECONDS_FOR_A_PAGE:.0f} s"
        for result in ready:
            assert isinstance(result, Connection)
            waiting.remove(result)
            if failure := _told(result):
                return f"process {results.index(result)}: {failure}"
    return ""


def _told(result: Connection) -> str:
    try:
        said: str = result.recv()
    except EOFError:
        return "it ended early"
    return said


def _perform(task: Task, environment: Mapping[str, str], folder: Path, send: Connection) -> None:
    os.environ.update(environment)
    os.chdir(folder)
    try:
        task()
    except BaseException:
        send.send(traceback.format_exc())
    else:
        send.send("")
    send.close()


def _run_command(file: Path, words: Sequence[str], output: Path) -> None:
    if words[0] != "rpcrun":
        _run_file(file, words[2:], output)
        return
    os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)  # where its workers print, too
    main: Callable[[Sequence[str]], int] = importlib.import_module("tensorwire.launch.main").run
    code = main([*_FORKED, *words[1:]])
    assert code == 0, f"exit code {code}"


def _run_file(file: Path, arguments: Sequence[str], output: Path) -> None:
    sys.argv = [str(file), *arguments]
    with output.open("w", buffering=1) as printed, contextlib.redirect_stdout(printed):
        runpy.run_path(str(file), run_name="__main__")


def _run_blocks(session: Session, page: str, name: str) -> None:
    """Runs what one worker runs, in the main module, as a script does."""
    module = types.ModuleType("__main__")
    module.__dict__["name"] = name
    sys.modules["__main__"] = module
    mode, workers = session.setting.mode, session.setting.workers
    with _member(name) if mode in (Mode.ON_ONE, Mode.ON_EACH) else contextlib.nullcontext():
        if mode is Mode.ON_ONE and name != workers[0]:
            return
        for block in session.blocks:
            _run_block(block, page, module)


@contextlib.contextmanager
def _member(name: str) -> Iterator[None]:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(name, rank=rank, world_size=size)
    yield  # after an error no one is waited for
    rpc.shutdown()


def _run_block(block: Block, page: str, module: types.ModuleType) -> None:
    code = compile(block.padded(), page, "exec")
    if block.raises is None:
        exec(code, module.__dict__)
        return
    try:
        exec(code, module.__dict__)
    except Exception as error:
        if block.raises not in {each.__name__ for each in type(error).__mro__}:
            raise
    else:
        raise AssertionError(f"{page}, line {block.line}: raised no {block.raises}")
