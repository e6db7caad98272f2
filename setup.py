"""Builds the package; with ``TENSORWIRE_COMPILE=1`` compiles the modules of :data:`COMPILED`.

All else of the build is in ``pyproject.toml``. Without that variable every module is Python, from
the same sources. ``CONTRIBUTING.md`` says what mypyc, mypy's compiler, needs of them.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from setuptools import Extension

COMPILED = [
    "rpc/calls/call_parts.py",
    "rpc/calls/callee.py",
    "rpc/calls/caller.py",
    "rpc/calls/outstanding.py",
    "rpc/calls/packing.py",
    "rpc/calls/service.py",
    "rpc/outcomes/sinks.py",
    "rpc/runtime/executor.py",
    "rpc/transports/flow.py",
    "rpc/transports/tensorwire/busy_polling.py",
    "rpc/transports/tensorwire/channel.py",
    "rpc/transports/tensorwire/main_reader.py",
    "rpc/transports/tensorwire/peer.py",
    "rpc/transports/tensorwire/replies.py",
    "rpc/transports/tensorwire/requests.py",
    "rpc/transports/tensorwire/transport.py",
    "rpc/wire/messages.py",
    "rpc/wire/simple_values.py",
    "rpc/wire/tensor_table.py",
    "rpc/wire/tensor_ties.py",
]
_MYPY = "mypy>=2.4,<2.5"
_LIBRARY = "tensorwire"
_OFFER = re.compile(r"if \(\w+_free_instance == NULL\) \{")
_BUILDS = {"bdist_wheel", "build", "build_ext"}
_BESIDE_SOURCES = {"develop", "editable_wheel", "--inplace", "-i"}
# The types of other packages make nothing faster, and so a build need not install them.
_CONFIGURATION = """\
[mypy]
explicit_package_bases = True
follow_imports = silent
ignore_missing_imports = True
cache_dir = build/mypy

[mypy-torch.*,numpy.*,cloudpickle.*]
follow_imports = skip
follow_imports_for_stubs = True
"""


def main() -> None:
    """Runs setuptools, as pip asks for it: for what a build needs, for metadata, or for a wheel."""
    from setuptools import setup

    asked = {*sys.argv}
    if os.environ.get("TENSORWIRE_COMPILE", "0") in ("", "0"):
        setup()
    elif asked & _BESIDE_SOURCES:
        _refuse(
            "makes no editable install: compiled modules beside the sources would hide their later "
            "changes; make test COMPILED=1 tests a copy"
        )
    elif asked & _BUILDS:
        setup(ext_modules=_extensions())
    else:
        setup(setup_requires=[_MYPY] if "egg_info" in asked else [])


def _extensions() -> list[Extension]:
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        _refuse(f"needs a C compiler, and {compiler!r} is not there; CC names another")
    header = Path(sysconfig.get_path("include"), "Python.h")
    if not header.exists():
        _refuse(f"needs the headers of this Python, and {header} is not there")
    try:
        from mypyc.build import mypycify
    except ImportError as error:
        _refuse(f"needs {_MYPY}, which cannot be imported: {error}")
    configuration = Path("build", "mypyc.ini")
    configuration.parent.mkdir(exist_ok=True)
    configuration.write_text(_CONFIGURATION)
    _remove_what_was_built_of_other_modules()
    options = [f"--config-file={configuration}"]
    extensions = mypycify([*options, *COMPILED], opt_level="2", group_name=_LIBRARY)
    _free_what_functions_hold_at_once({path for each in extensions for path in each.sources})
    return extensions


def _free_what_functions_hold_at_once(sources: set[str]) -> None:
    """Changes mypyc's C code so that no variables of one call become those of another.

    Of each function that has a function in it, mypyc keeps the variables of the last call for the
    next one, and offers them before it has dropped what they hold. A finalizer or another thread
    that runs in between takes them, and loses its own.
    """
    changes = 0
    for path in map(Path, sources):
        code, count = _OFFER.subn("if (0) {", path.read_text())
        if count:
            path.write_text(code)
        changes += count
    if not changes:
        _refuse(f"knows {_MYPY} alone: another offers what it has not freed in other words")


def _remove_what_was_built_of_other_modules() -> None:
    """Removes the results of earlier builds that setuptools would pack, though none is wanted."""
    wanted = {Path(path).with_suffix("") for path in [*COMPILED, f"{_LIBRARY}__mypyc.py"]}
    for built in Path("build").glob("lib.*"):
        for path in [*built.rglob("*.so"), *built.rglob("*.py")]:
            source = path.relative_to(built)
            stem = source.with_name(source.name.partition(".")[0])
            if not (stem in wanted if path.suffix == ".so" else source.exists()):
                path.unlink()


def _refuse(why: str) -> NoReturn:
    sys.exit(f"TENSORWIRE_COMPILE=1 {why}")


if __name__ == "__main__":
    main()
