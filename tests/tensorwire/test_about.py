"""``python -m tensorwire``: what is installed, and what of the machine matters."""

from __future__ import annotations

import importlib.machinery
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rpc
from tensorwire.__main__ import lines, main
from tensorwire._about import About, Extra, Machine, core_limit, extras, modules

_MACHINE = Machine(
    "Linux 6.1 x86_64", 2, 8, 1.5, 16_000_000_000, 1 << 26, 1 << 25, None, 1024, True,
    ("mlx5_0",), (),
)  # fmt: skip


def test_an_extra_lists_what_is_there_and_what_is_missing_also_through_others() -> None:
    needs = [
        "torch>=2.6",
        'numba>=0.60; extra == "ps"',
        'tensorwire[checkpoint,tls]; extra == "ps"',
        'xxhash>=3; extra == "checkpoint"',
        "cryptography>=42; extra == 'tls'",
        'tomli>=2; python_version < "3.2" and extra == "tls"',
        'pytest>=8; extra == "dev"',
    ]
    there = {"numba": "0.68", "xxhash": "3.5"}
    assert extras(needs, there.get) == (
        Extra("checkpoint", {"xxhash": "3.5"}, ()),
        Extra("ps", {"numba": "0.68", "xxhash": "3.5"}, ("cryptography",)),
        Extra("tls", {}, ("cryptography",)),
    )


@pytest.mark.parametrize(
    ("text", "limit"), [("150000 100000\n", 1.5), ("max 100000", None), ("", None)]
)
def test_the_limit_of_a_control_group_is_read(text: str, limit: float | None) -> None:
    assert core_limit(text) == limit


def test_the_facts_are_told_in_words() -> None:
    found = About(
        "1.2", "3.11", "2.13", 300, (), ("TENSORWIRE", "TENSORPIPE"),
        (Extra("ps", {"numba": "0.68"}, ()), Extra("tls", {}, ("cryptography",))),
        "numba", _MACHINE,
    )  # fmt: skip
    told = dict(lines(found))
    assert told["modules"] == "interpreted: 300 of Python"
    compiled = replace(found, compiled=("rpc.calls.callee", "rpc.calls.caller"))
    words = "compiled: 2 of 300, such as rpc.calls.callee"
    assert dict(lines(compiled))["modules"] == words
    assert told["backends"] == "TENSORWIRE, TENSORPIPE (default: TENSORWIRE)"
    assert told["[ps]"] == "numba 0.68"
    assert told["[tls]"] == "not installed: cryptography"
    assert told["cores"] == "2 of 8; limited to the time of 1.5"
    assert told["/dev/shm"] == "0.07 GB, 0.03 free; little for TENSORPIPE"
    assert told["locked memory"] == "no limit"
    assert told["autogroups"] == "on: cores are divided among sessions first"
    assert told["InfiniBand"] == "mlx5_0"


def test_modules_that_python_imports_compiled_are_named(tmp_path: Path) -> None:
    (tmp_path / "rpc" / "calls").mkdir(parents=True)
    for name in ("__init__.py", "calls/__init__.py", "calls/callee.py", "calls/caller.py"):
        (tmp_path / "rpc" / name).touch()
    assert modules(tmp_path) == (4, ())
    library = f"caller{importlib.machinery.EXTENSION_SUFFIXES[0]}"
    (tmp_path / "rpc" / "calls" / library).touch()
    (tmp_path / "rpc" / "calls" / "callee.cpython-27.so").touch()  # another Python's
    assert modules(tmp_path) == (4, ("rpc.calls.caller",))


def test_scripts_read_what_is_true_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RPC_BACKEND", "TENSORPIPE")
    assert main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["version"] == rpc.__version__
    assert told["torch"] == str(torch.__version__)
    assert told["backends"][0] == "TENSORPIPE"
    assert set(told["backends"]) == {each.name for each in rpc.BackendType}
    assert told["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert main([]) == 0
    backends = f"{', '.join(told['backends'])} (default: TENSORPIPE)"
    assert backends in capsys.readouterr().out
