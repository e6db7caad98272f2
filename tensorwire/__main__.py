"""``python -m tensorwire``: what is installed here, and what of this machine matters to a job."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Final

from tensorwire._about import About, Extra, Machine, about

_GIGABYTE: Final = 1e9
_SMALL_SHARED_MEMORY: Final = 1 << 28


def main(arguments: list[str] | None = None) -> int:
    """Runs the command; returns the process's exit status."""
    parser = argparse.ArgumentParser(prog="python -m tensorwire", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    facts = about()
    if parser.parse_args(arguments).json:
        print(json.dumps(asdict(facts), indent=2))
    else:
        print("\n".join(f"{name:<15} {value}" for name, value in lines(facts)))
    return 0


def lines(facts: About) -> Iterable[tuple[str, str]]:
    """The facts in words: a name and a text for each line."""
    yield "tensorwire", facts.version
    yield "Python", facts.python
    yield "torch", facts.torch
    yield "modules", _modules(facts)
    yield "backends", f"{', '.join(facts.backends)} (default: {facts.backends[0]})"
    yield "kernels", facts.kernels
    for extra in facts.extras:
        yield f"[{extra.name}]", _extra(extra)
    if not facts.extras:
        yield "extras", "unknown: this copy is not installed as a package"
    yield from _machine(facts.machine)


def _modules(facts: About) -> str:
    if not facts.compiled:
        return f"interpreted: {facts.modules} of Python"
    return f"compiled: {len(facts.compiled)} of {facts.modules}, such as {facts.compiled[0]}"


def _extra(extra: Extra) -> str:
    if not extra.missing:
        return ", ".join(f"{name} {version}" for name, version in extra.versions.items())
    return f"not installed: {', '.join(extra.missing)}"


def _machine(machine: Machine) -> Iterable[tuple[str, str]]:
    yield "system", machine.system
    limit = "" if machine.core_limit is None else f"; limited to the time of {machine.core_limit:g}"
    yield "cores", f"{machine.cores} of {machine.all_cores}{limit}"
    yield "memory", f"{machine.memory_bytes / _GIGABYTE:.1f} GB"
    yield "/dev/shm", _shared_memory(machine)
    locked = machine.locked_memory_bytes
    yield "locked memory", "no limit" if locked is None else f"{locked / 1e6:.0f} MB a process"
    yield "open files", f"{machine.open_files} a process"
    yield "autogroups", _autogroups(machine.autogroups)
    yield "InfiniBand", ", ".join(machine.infiniband) or "none"
    yield "GPUs", ", ".join(machine.gpus) or "none"


def _shared_memory(machine: Machine) -> str:
    size, free = machine.shared_memory_bytes, machine.shared_memory_free
    if size is None or free is None:
        return "none: TENSORPIPE and loaders of torch cannot share memory"
    text = f"{size / _GIGABYTE:.2f} GB, {free / _GIGABYTE:.2f} free"
    return f"{text}; little for TENSORPIPE" if size < _SMALL_SHARED_MEMORY else text


def _autogroups(on: bool | None) -> str:
    if on is None:
        return "this kernel has none"
    return "on: cores are divided among sessions first" if on else "off"


if __name__ == "__main__":
    sys.exit(main())
