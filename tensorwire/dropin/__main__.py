"""Runs a program whose imports of torch's RPC stand for ours.

python -m tensorwire.dropin script.py arguments ...
python -m tensorwire.dropin -m package.module arguments ...
"""

from __future__ import annotations

import os
import runpy
import sys
import types
from collections.abc import Sequence

from tensorwire.dropin.installing import install

_USAGE = """\
Runs a program whose imports of torch.distributed.rpc stand for TensorWire.

usage: python -m tensorwire.dropin [--backend TENSORWIRE] script.py arguments ...
       python -m tensorwire.dropin [--backend TENSORWIRE] -m package.module arguments ...

--backend says over which backend groups are formed, whatever the program names.
"""


def main(arguments: Sequence[str]) -> None:
    """Installs the redirection and runs what ``arguments`` name."""
    backend = None
    if list(arguments[:1]) == ["--backend"]:
        backend, arguments = (arguments[1] if len(arguments) > 1 else None), arguments[2:]
    if list(arguments[:1]) in (["-h"], ["--help"]):
        print(_USAGE, end="")
    elif not arguments or list(arguments) == ["-m"] or arguments[0].startswith("--"):
        raise SystemExit(_USAGE)
    else:
        run(arguments, backend)


def run(arguments: Sequence[str], backend: str | None) -> None:
    """Runs a script, or a module after ``-m``."""
    try:
        install(backend)
    except ValueError as error:
        raise SystemExit(f"tensorwire.dropin: {error}") from None
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        sys.path[0] = os.getcwd()
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        run_script(arguments[0])


def run_script(path: str) -> None:
    """Runs a file as the main module, which stays the main module until the process ends."""
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    sys.path[0] = os.path.dirname(os.path.abspath(path))
    module = types.ModuleType("__main__")
    module.__file__ = path
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


if __name__ == "__main__":
    main(sys.argv[1:])
