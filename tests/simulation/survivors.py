"""Reads and writes ``SURVIVORS.md``: the mutants that the simulator lets live, and why it may.

Each is one item: its key, who else kills it, and after a dash the argument.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from pathlib import Path

FILE = Path(__file__).with_name("SURVIVORS.md")
_ITEM = re.compile(r"^- (?P<ticks>`+)(?P<key>.*?)(?P=ticks) \((?P<units>[^)]*)\): ?(?P<why>.*)$")
_UNITS = {True: "unit tests kill it", False: "nothing kills it"}
_HEAD = """# Mutants that the simulator lets live

Brought up to date by `make mutants ARGS=--write`, which keeps the arguments; every item
needs one, or `make mutants` fails. An argument says why no run can tell the mutant from
the original by the rules, or why what it breaks is not for the simulator to find.
"""


def read_survivors(file: Path = FILE) -> dict[str, str]:
    """The argument for each mutant that is listed; empty where there is none yet."""
    return {item["key"].strip(): item["why"] for item in _items(file)}


def write_survivors(survivors: dict[str, bool], unjudged: Set[str], file: Path = FILE) -> None:
    """Brings the list up to date, by module; arguments stay.

    Args:
        survivors: of those that were judged now; true if unit tests kill it.
        unjudged: those that were not: an item of one of them stays as it is.
        file: to read and to write.
    """
    found: dict[str, dict[str, str]] = {}
    argued = read_survivors(file)
    for item in _items(file):
        key = item["key"].strip()
        module = found.setdefault(_module(key), {})
        if key in unjudged:
            module[key] = item[0]
    for key, units in survivors.items():
        line = f"- `` {key} `` ({_UNITS[units]}): {argued.get(key, '')}"
        found.setdefault(_module(key), {})[key] = line.rstrip()
    parts = ["\n".join([f"## {name}\n", *found[name].values()]) for name in found if found[name]]
    file.write_text("\n\n".join([_HEAD.rstrip(), *parts]) + "\n")


def _items(file: Path) -> Iterator[re.Match[str]]:
    lines = file.read_text().splitlines() if file.exists() else []
    return (item for item in map(_ITEM.match, lines) if item)


def _module(key: str) -> str:
    return key.split(".")[0]
