"""Reads and writes ``SURVIVORS.md``: the mutants that the simulator lets live, and why it may.

Each is one item: its key, who else kills it, and after a dash the argument.
"""

from __future__ import annotations

import re
from pathlib import Path

FILE = Path(__file__).with_name("SURVIVORS.md")
_ITEM = re.compile(r"^- (?P<ticks>`+)(?P<key>.*?)(?P=ticks) \((?P<units>[^)]*)\): ?(?P<why>.*)$")
_UNITS = {True: "unit tests kill it", False: "nothing kills it"}
_HEAD = """# Mutants that the simulator lets live

Brought up to date by `make mutants ARGS=--write`, which keeps the arguments; every item
needs one, or `make mutants` fails. An argument says why no run can tell the mutant from
the original by the rules, or why what it breaks is not for the simulator to find.
"""


def read_survivors() -> dict[str, str]:
    """The argument for each mutant that is listed; empty where there is none yet."""
    if not FILE.exists():
        return {}
    items = map(_ITEM.match, FILE.read_text().splitlines())
    return {item["key"].strip(): item["why"] for item in items if item}


def write_survivors(survivors: dict[str, bool], argued: dict[str, str]) -> None:
    """Lists the survivors, by module; ``survivors`` says whether unit tests kill each."""
    lines = [_HEAD]
    module = ""
    for key, units in survivors.items():
        if key.split(".")[0] != module:
            module = key.split(".")[0]
            lines.append(f"{'' if len(lines) == 1 else chr(10)}## {module}\n")
        lines.append(f"- `` {key} `` ({_UNITS[units]}): {argued.get(key, '')}".rstrip())
    FILE.write_text("\n".join(lines) + "\n")
