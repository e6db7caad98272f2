"""The map of the house names every room."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_RPC = _ROOT / "rpc"


def rooms() -> list[str]:
    """The names in the first column of the table of rooms."""
    text = (_ROOT / "ARCHITECTURE.md").read_text().partition("## Rooms of `rpc/`")[2]
    column = "\n".join(line.split("|")[1] for line in text.splitlines() if line.startswith("|"))
    return re.findall(r"`(\w[\w*]*\.py|\w+/)`", column)


def test_every_module_of_rpc_is_on_the_map() -> None:
    packages = [f"{path.parent.name}/" for path in _RPC.glob("*/__init__.py")]
    modules = [path.name for path in _RPC.glob("*.py")]
    named = rooms()
    assert [each for each in modules + packages if not any(fnmatch(each, n) for n in named)] == []


def test_every_room_on_the_map_is_there() -> None:
    assert [name for name in rooms() if not list(_RPC.glob(name))] == []


def test_threads_are_ours() -> None:
    """Those of ``threading`` cannot be started in exit hooks everywhere."""
    packages = ("rpc", "autograd_dist", "optim_dist", "remote_module")
    modules = [path for package in packages for path in (_ROOT / package).rglob("*.py")]
    plain = [str(path) for path in modules if "threading.Thread(" in path.read_text()]
    assert plain == []
