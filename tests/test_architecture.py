"""The house is as ARCHITECTURE.md draws it: its rooms, and who may use whom."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path(__file__).parent.parent
_FLOORS = ("rpc", "autograd_dist", "optim_dist", "remote_module", "tensorwire")
_MAP = (_ROOT / "ARCHITECTURE.md").read_text()
_SERVER = "tensorwire.parameter_server"
_PUBLIC = {"rpc", "rpc.extend", "rpc.errors"}
"""The modules of ``rpc`` that the floors above it may import."""
_NAMES_OF_TORCH = {
    "_actions",
    "_backward_hooks",
    "_build_rpc_profiling_key",
    "_collect_all",
    "_context_id",
    "_current_context",
    "_delete_all_user_and_unforked_owner_rrefs",
    "_deserialize",
    "_disable_profiler",
    "_fields",
    "_get_current_rpc_agent",
    "_get_future",
    "_get_profiling_future",
    "_get_type",
    "_is_current_rpc_agent_set",
    "_recv_functions",
    "_RemoteModule",
    "_rref_context_get_debug_info",
    "_send_functions",
    "_serialize",
    "_set_rpc_timeout",
    "_sleep",
    "_thread_local_var",
    "_use_rpc_pickler",
    "_values",
    "_version",
    "_wait_all",
}
"""Private names that torch or Python have, too: programs use them, and ours keeps what they do."""
_ASSEMBLY = {"agent", "bring_up", "builtin_backends", "backend_registry", "api", "serving"}
"""The modules that assemble a worker, or have it done."""


def _modules() -> dict[str, Path]:
    """The files of all floors, by the names under which they are imported."""
    paths = [path for floor in _FLOORS for path in (_ROOT / floor).rglob("*.py")]
    dotted = [".".join(path.relative_to(_ROOT).with_suffix("").parts) for path in paths]
    return {n.removesuffix(".__init__"): path for n, path in zip(dotted, paths, strict=True)}


_MODULES = _modules()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _imports(path: Path) -> Iterator[str]:
    """The modules of ours that a file imports anywhere, under ``TYPE_CHECKING`` too."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in _MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found = full if full in _MODULES else node.module
                if found in _MODULES:
                    yield found


def _room(module: str) -> str:
    """The package or top-level module of ``rpc`` that a module is in; else its floor."""
    parts = module.split(".")
    return ".".join(parts[:2]) if parts[0] == "rpc" else parts[0]


def _section(heading: str) -> str:
    return _MAP.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def _stairs(section: str = "The staircase") -> list[list[list[str]]]:
    """The drawn stairs, lowest first: on each, its rooms; those joined by ``+`` are one."""
    drawing = _section(section).split("```")[1]
    lines = [line.split(" — ")[0] for line in drawing.strip().splitlines()]
    return [[joined.strip().split(" + ") for joined in line.split(",")] for line in reversed(lines)]


def test_every_room_of_rpc_is_on_the_map_and_no_other() -> None:
    column = [line.split("|")[1] for line in _section("Rooms").splitlines() if "|" in line]
    named = re.findall(r"`(\w+(?:\.py|/))`", "\n".join(column))
    packages = [f"{path.parent.name}/" for path in (_ROOT / "rpc").glob("*/__init__.py")]
    modules = [path.name for path in (_ROOT / "rpc").glob("*.py")]
    assert sorted(named) == sorted(packages + modules)


def test_files_that_the_map_names_exist() -> None:
    named = set(re.findall(r"`([\w/]+\.py)`", _MAP))
    places = [_ROOT, _ROOT / "rpc", *(_ROOT / "tensorwire").rglob("")]
    assert [n for n in named if not any((place / n).is_file() for place in places)] == []


def test_no_named_tuple_is_generic() -> None:
    """Python 3.10 refuses such a class when its module is imported, and mypy does not say so."""
    refused = [
        f"{name}: {node.name}"
        for name, path in _MODULES.items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef) and len(node.bases) > 1
        if "NamedTuple" in {ast.unparse(base) for base in node.bases}
    ]
    assert refused == []


def test_the_top_of_rpc_stays_small() -> None:
    assert len(list((_ROOT / "rpc").glob("*.py"))) <= 24


def test_every_room_uses_only_rooms_on_lower_stairs() -> None:
    stair_of = {
        room: (height, tuple(joined))
        for height, stair in enumerate(_stairs())
        for joined in stair
        for room in joined
    }
    wrong = [
        f"{module} imports {imported}"
        for module, path in _MODULES.items()
        for imported in _imports(path)
        if stair_of[_room(module)] != (above := stair_of[_room(imported)])
        and stair_of[_room(module)][0] <= above[0]
    ]
    assert wrong == []


def _room_of_server(module: str) -> str:
    """The room of the parameter server that a module is in."""
    inside = module.removeprefix(_SERVER).lstrip(".")
    return inside.split(".")[0] or "__init__"


def test_every_room_of_the_parameter_server_uses_only_rooms_on_lower_stairs() -> None:
    stairs = _stairs("The rooms of the parameter server")
    stair_of = {room: height for height, stair in enumerate(stairs) for (room,) in stair}
    modules = {m: path for m, path in _MODULES.items() if m.startswith(_SERVER)}
    assert {_room_of_server(m) for m in modules} == set(stair_of)
    wrong = [
        f"{module} imports {imported}"
        for module, path in modules.items()
        for imported in _imports(path)
        if imported.startswith(f"{_SERVER}.")
        if (here := _room_of_server(module)) != (there := _room_of_server(imported))
        and stair_of[here] <= stair_of[there]
        and here not in ("__init__", "__main__")
    ]
    assert wrong == []


def test_floors_above_rpc_use_only_its_public_names() -> None:
    wrong = [
        f"{module} imports {imported}"
        for module, path in _MODULES.items()
        if not module.startswith("rpc")
        for imported in _imports(path)
        if imported.startswith("rpc") and imported not in _PUBLIC
    ]
    assert wrong == []


def test_nobody_but_who_assembles_a_worker_takes_an_agent() -> None:
    """Others are given the two or three objects that they use."""
    takers = set()
    for module, path in _MODULES.items():
        if any(module == f"rpc.{each}" for each in _ASSEMBLY) or "testing" in module:
            continue
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.arg) and node.annotation is not None:
                name = ast.unparse(node.annotation).strip("'\"").rpartition(".")[2]
                if name == "Agent":
                    takers.add(module)
    assert takers == set()


def test_threads_are_ours() -> None:
    """Those of ``threading`` cannot be started in exit hooks everywhere."""
    packages = ("rpc", "autograd_dist", "optim_dist", "remote_module")
    modules = [path for package in packages for path in (_ROOT / package).rglob("*.py")]
    plain = [str(path) for path in modules if "threading.Thread(" in path.read_text()]
    assert plain == []


_DEFINED = re.compile(
    r"^ *(_[a-zA-Z]\w*) *[:=]|(?:def|class) (_[a-zA-Z]\w*)|self\.(_[a-zA-Z]\w*)", re.M
)
_REACHED_FOR = re.compile(r"(?<!\bself)\.(_[a-zA-Z]\w*)|setattr\([^\"]*\"(_[a-zA-Z]\w*)\"")
_IMPORTED = re.compile(r"^from [\w.]+ import (\([^)]*\)|.*)$", re.M)


def _names(pattern: re.Pattern[str], text: str) -> set[str]:
    """The texts that the groups of a pattern match."""
    return {name for match in pattern.finditer(text) for name in match.groups() if name}


def _tested(test: Path) -> Path | None:
    """The module of a test file: ``test_channel.py`` and ``test_channel_ends.py`` are channel's."""
    words = test.stem.removeprefix("test_").split("_")
    names = ("_".join(words[:end]) for end in range(len(words), 0, -1))
    paths = (_ROOT / test.with_name(f"{name}.py") for name in names)
    return next((path for path in paths if path.is_file()), None)


def test_tests_reach_for_private_names_of_their_own_module_at_most() -> None:
    ours = {path: _names(_DEFINED, path.read_text()) for path in _MODULES.values()}
    all_ours = set().union(*ours.values())
    wrong = []
    for path in (_ROOT / "tests").rglob("test_*.py"):
        if path.name == "test_mutants.py":  # which changes decisions from within
            continue
        text, place = path.read_text(), path.relative_to(_ROOT / "tests")
        tested = _tested(place)
        imported = " ".join(_IMPORTED.findall(text))
        used = _names(_REACHED_FOR, text) | set(re.findall(r"\b_[a-zA-Z]\w*", imported))
        mine = _names(_DEFINED, text) | _NAMES_OF_TORCH
        mine |= ours.get(tested, set()) if tested else set()
        wrong += [f"{place} uses {name}" for name in sorted(used & all_ours - mine)]
    assert wrong == []
