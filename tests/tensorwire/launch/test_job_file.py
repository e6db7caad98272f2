"""Job files say what a command line says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tensorwire.launch.flags import parse
from tensorwire.launch.job_file import JobFileError
from tensorwire.launch.roles import Restart, Role, Share

YAML = """
nnodes: 1:4
rdzv_endpoint: head:29400
max_restarts: 3
tee: 3
spare: 1
standalone: true
insecure: false
duplicate_stdout_filters: [apple, orange]
program: train.py
args: [--lr, 0.1]
roles:
  ps: {count: 2/job, service: my.server, args: [--dim, 64]}
  trainer:
    count: 4
    max_restarts: 0
    restart: role
  reader: {count: 1, service: true, pg: false}
"""

TOML = """
nnodes = "1:4"
rdzv_endpoint = "head:29400"
max_restarts = 3
tee = 3
spare = 1
standalone = true
insecure = false
duplicate_stdout_filters = ["apple", "orange"]
program = "train.py"
args = ["--lr", 0.1]
[roles.ps]
count = "2/job"
service = "my.server"
args = ["--dim", 64]
[roles.trainer]
count = 4
max_restarts = 0
restart = "role"
[roles.reader]
count = 1
service = true
pg = false
"""

ROLES = (
    Role("ps", 2, Share.JOB, service=True, module="my.server", arguments=("--dim", "64")),
    Role("trainer", 4, max_restarts=0, restart=Restart.ROLE),
    Role("reader", 1, service=True),
)


def write(folder: Path, text: str, name: str = "job.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(("text", "name"), [(YAML, "job.yaml"), (TOML, "job.toml")])
def test_a_job_file_stands_for_flags_roles_and_program(
    tmp_path: Path, text: str, name: str
) -> None:
    command = parse(["--job", write(tmp_path, text, name)])
    assert command.roles == ROLES
    said = command.arguments
    assert (said.nnodes, said.rdzv_endpoint, said.max_restarts) == ("1:4", "head:29400", 3)
    assert (said.standalone, said.insecure, said.spare, said.tee) == (True, False, 1, "3")
    assert said.duplicate_stdout_filters == ["apple", "orange"]
    assert (said.training_script, said.training_script_args) == ("train.py", ["--lr", "0.1"])


def test_the_command_line_counts_more(tmp_path: Path) -> None:
    flags = ["--nnodes", "2", "--role", "trainer:8", "--job", write(tmp_path, YAML), "mine.py", "x"]
    command = parse(flags)
    assert command.arguments.nnodes == "2"
    assert command.roles == (ROLES[0], ROLES[2], Role("trainer", 8))
    assert command.arguments.training_script == "mine.py"
    assert command.arguments.training_script_args == ["x"]


def test_a_module_may_be_the_program(tmp_path: Path) -> None:
    said = parse(["--job", write(tmp_path, "module: my.train\nargs: [a]")]).arguments
    assert (said.module, said.training_script, said.training_script_args) == (
        True,
        "my.train",
        ["a"],
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: 2", "there is no flag 'nodes'"),
        ("role: trainer", "there is no flag 'role'"),
        ("standalone: maybe", "standalone must be true or false, but is 'maybe'"),
        ("program: a.py\nmodule: b", "program and module exclude each other"),
        ("args: [a]", "args without a program"),
        ("program: a.py\nargs: a", "args must be a list"),
        ("roles: [ps]", "roles must be a mapping"),
        ("roles: {ps: 2}", "role 'ps' must be a mapping with a count"),
        ("roles: {ps: {count: two}}", "role 'ps': count='two' must be COUNT or COUNT/job"),
        ("roles: {ps: {count: 2, servise: true}}", "there is no option 'servise'"),
        ("roles: {ps: {count: 2, args: [a]}}", "args belong to a service=MODULE"),
        ("nnodes: {a: 1}", "nnodes must be a text or a number"),
        ("- a", "it must be a mapping"),
        ("a: [", "while parsing"),
    ],
)
def test_what_is_wrong_with_a_job_file_is_said(tmp_path: Path, text: str, problem: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(JobFileError) as raised:
        parse(["--job", path])
    assert problem in str(raised.value)
    assert path in str(raised.value)


def test_a_job_file_has_to_be_there_and_of_a_known_kind(tmp_path: Path) -> None:
    with pytest.raises(JobFileError, match="No such file"):
        parse(["--job", str(tmp_path / "none.yaml")])
    with pytest.raises(JobFileError, match=r"must end in .yaml, .yml or .toml"):
        parse(["--job", write(tmp_path, "", "job.json")])
