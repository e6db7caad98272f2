"""The README's programs do what it says they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.free_ports import free_port

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

PROGRAM = re.compile(
    r"Save as `(?P<file>\w+\.py)`:\n\n```python\n(?P<code>.*?)```\n.*?"
    r"```console\n\$ export [^\n]*\n\$ (?P<command>[^\n]*)\n(?P<output>.*?)```",
    re.DOTALL,
)
PROGRAMS = list(PROGRAM.finditer(README))


def _start(command: str, directory: Path, port: int) -> subprocess.Popen[str]:
    words = [sys.executable, *command.split()[1:]]
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment["PYTHONPATH"] = str(ROOT)
    return subprocess.Popen(
        words, cwd=directory, env=environment, stdout=subprocess.PIPE, text=True
    )


def _lines(text: str) -> list[str]:
    """Without how long anything took."""
    return [line.rstrip() for line in re.sub(r"\d+\.\d s", "N s", text).splitlines()]


@pytest.mark.slow
@pytest.mark.xdist_group("readme")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program["file"])
def test_a_program_prints_what_the_readme_shows(program: re.Match[str], tmp_path: Path) -> None:
    (tmp_path / program["file"]).write_text(program["code"])
    port = free_port()
    workers = [_start(each, tmp_path, port) for each in program["command"].split(" & ")]
    printed = [worker.communicate(timeout=90)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * len(workers)
    assert _lines("".join(printed)) == _lines(program["output"])


def test_the_readme_has_the_four_programs() -> None:
    files = [program["file"] for program in PROGRAMS]
    assert files == ["parameter_server.py", "pipeline.py", "remote_layer.py", "elastic.py"]


def test_the_test_example_runs() -> None:
    code = next(
        b for b in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "MemoryHub" in b
    )
    exec(compile(code, "README.md", "exec"), {})


def test_the_broken_rule_is_told_as_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    code, shown = next(
        found
        for found in re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", README, re.DOTALL)
        if "NeverTells" in found[0]
    )
    exec(compile(code, "README.md", "exec"), {})
    assert capsys.readouterr().out == shown
