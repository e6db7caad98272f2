"""Turns a process that has imported much into a worker.

A worker that is forked off a template, or was started before anybody knew whose it would be, must
not differ from one that a command started. So before the program begins, whatever Python and torch
take from the command line and the environment when they start is done again here: arguments, the
path of modules, output streams, numbers of threads, the state of random generators.

Imports nothing but Python's own modules, as a process that waits has yet to import the others.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import io
import os
import runpy
import signal
import sys
import threading
import traceback
import types
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import TracebackType
from typing import NoReturn

_MAIN = "__main__"
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_OPENBLAS = ("scipy_openblas_{}_num_threads64_", "scipy_openblas_{}_num_threads",
             "openblas_{}_num_threads64_", "openblas_{}_num_threads")  # fmt: skip
"""Names of its functions, as numpy's and others' builds have them."""


@dataclass(frozen=True, slots=True)
class Order:
    """A worker to become.

    Args:
        environment: all of its variables.
        program: as after ``python -u``: a script or ``-m`` and a module, and arguments.
        stdout: the file that takes its output; None leaves the stream as it is.
        stderr: likewise.
    """

    environment: dict[str, str]
    program: tuple[str, ...]
    stdout: str | None = None
    stderr: str | None = None


def become(order: Order) -> NoReturn:
    """Runs a worker's program in this process, and ends it as Python would."""
    code = 1
    try:
        _send_to(order.stdout, 1)
        _send_to(order.stderr, 2)
        os.environ.clear()
        os.environ.update(order.environment)
        _set_threads(order.environment)
        _reseed()
        code = _outcome(order.program)
    except BaseException:
        traceback.print_exc()
    _end(code)


def _send_to(path: str | None, descriptor: int) -> None:
    """Has a stream go to a file, and keep nothing back, as under ``python -u``."""
    stream = sys.stdout if descriptor == 1 else sys.stderr
    stream.flush()
    if path is not None:
        with open(path, "wb") as file:
            os.dup2(file.fileno(), descriptor)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(write_through=True)


def _set_threads(environment: dict[str, str]) -> None:
    """Has torch and numpy use as many threads as they would have begun with."""
    count = _number(environment, "OMP_NUM_THREADS") or _number(environment, "MKL_NUM_THREADS")
    count = count or len(os.sched_getaffinity(0))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    for library in _openblas_libraries():
        _set_openblas(library, _number(environment, "OPENBLAS_NUM_THREADS") or count)


def _number(environment: dict[str, str], name: str) -> int:
    text = environment.get(name, "")
    return int(text) if text.isdecimal() else 0


def _openblas_libraries() -> set[str]:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in maps if "openblas" in line}


def _set_openblas(path: str, count: int) -> None:
    library = ctypes.CDLL(path)
    for name in _OPENBLAS:
        if hasattr(library, name.format("set")):
            if getattr(library, name.format("get"))() != count:
                getattr(library, name.format("set"))(ctypes.c_int(count))
            return


def _reseed() -> None:
    """Seeds anew the generators that workers would share; Python's own does so at a fork."""
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        torch.default_generator.seed()
    if numpy is not None:
        numpy.random.seed()


def _outcome(program: tuple[str, ...]) -> int:
    """Runs the program; returns its exit code."""
    try:
        _run(program)
    except SystemExit as end:
        return _exit_code(end.code)
    except BaseException as error:
        error.__traceback__ = _of_the_program(error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        _leave_traceback(error)
        if isinstance(error, KeyboardInterrupt):
            _end_by_interrupt()
        return 1
    return 0


def _leave_traceback(error: BaseException) -> None:
    """Writes the traceback for the report of the job, unless torch's decorator has done so."""
    path = os.environ.get(_ERROR_FILE)
    if path and not os.path.exists(path) and "torch" in sys.modules:
        errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
        errors.get_error_handler().record_exception(error)


def _run(program: tuple[str, ...]) -> None:
    main = types.ModuleType(_MAIN)
    sys.modules[_MAIN] = main
    if program[0] == "-m":
        sys.argv = ["-m", *program[2:]]
        _set_first_path(os.getcwd())
        runpy._run_module_as_main(program[1])  # type: ignore[attr-defined]
        return
    path = os.path.abspath(program[0])
    sys.argv = list(program)
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main.__file__ = path
    main.__loader__ = SourceFileLoader(_MAIN, path)
    main.__dict__["__builtins__"] = __builtins__
    code = compile(Path(path).read_bytes(), path, "exec")
    exec(code, main.__dict__)


def _set_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = [folder]


def _of_the_program(trace: TracebackType | None) -> TracebackType | None:
    """The traceback without the frames that began the program."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _exit_code(given: object) -> int:
    """The exit code that Python makes of the argument of ``sys.exit``."""
    if given is None:
        return 0
    if isinstance(given, int):
        return given & 0xFF
    print(given, file=sys.stderr)
    return 1


def _end_by_interrupt() -> None:
    sys.stdout.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)


def _end(code: int) -> NoReturn:
    """Ends as Python does, but for freeing what the process would have had freed anyway."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        gc.freeze()
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120  # as Python has it
    os._exit(code)
