"""The command line: torchrun's flags mean what they mean there, and roles are ours."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import Std

from tensorwire.launch.flags import (
    ROLE_OF_JOB,
    FlagError,
    Forking,
    Shown,
    Streams,
    make_parser,
    parse,
    parse_shown,
    parse_streams,
)
from tensorwire.launch.roles import Role, RoleError

OF_TORCHRUN = [
    ("nnodes", "2:4"),
    ("nnodes", "3"),
    ("nproc-per-node", "3"),
    ("nproc-per-node", "auto"),
    ("nproc-per-node", "cpu"),
    ("nproc-per-node", "gpu"),
    ("nproc-per-node", "xpu"),
    ("rdzv-backend", "c10d"),
    ("rdzv-backend", "etcd"),
    ("rdzv-backend", "etcd-v2"),
    ("rdzv-backend", "tensorwire"),
    ("rdzv-endpoint", "head:29400"),
    ("rdzv-id", "job7"),
    ("rdzv-conf", "timeout=3,join_timeout=4"),
    ("standalone", None),
    ("max-restarts", "3"),
    ("monitor-interval", "0.5"),
    ("start-method", "fork"),
    ("event-log-handler", "console"),
    ("role", "trainer"),
    ("module", None),
    ("no-python", None),
    ("run-path", None),
    ("log-dir", "/tmp/logs"),
    ("redirects", "3"),
    ("redirects", "0:1,1:2"),
    ("tee", "3"),
    ("local-ranks-filter", "0,2"),
    ("duplicate-stdout-filters", "apple,orange"),
    ("duplicate-stderr-filters", "a,,b"),
    ("node-rank", "1"),
    ("master-addr", "head"),
    ("master-port", "1234"),
    ("local-addr", "10.0.0.1"),
    ("logs-specs", "mine"),
    ("numa-binding", "node"),
    ("signals-to-handle", "SIGTERM,SIGUSR1"),
    ("shutdown-timeout", "5"),
    ("virtual-local-rank", None),
]
"""A flag of torchrun and a value; None for one that takes none."""

NOT_IN_EACH_TORCH = {
    "duplicate-stdout-filters",
    "duplicate-stderr-filters",
    "numa-binding",
    "signals-to-handle",
    "shutdown-timeout",
    "virtual-local-rank",
    "event-log-handler",
}
"""Flags that the oldest torch we support does not have."""


def options_of(parser: Any) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings}


def there(flag: str) -> bool:
    return f"--{flag}" in options_of(torchrun.get_args_parser())


def of_torch(arguments: Any) -> dict[str, Any]:
    """The part of what was parsed that torchrun knows."""
    known = {action.dest for action in torchrun.get_args_parser()._actions}
    return {name: value for name, value in vars(arguments).items() if name in known}


def test_no_flag_of_torchrun_is_missing_here_or_in_this_table() -> None:
    torchs = options_of(torchrun.get_args_parser())
    assert torchs <= options_of(make_parser())
    flags = {option[2:] for option in torchs if option.startswith("--") and "_" not in option}
    assert flags - {"help"} - {flag for flag, _ in OF_TORCHRUN} == set()


@pytest.mark.parametrize(("flag", "value"), OF_TORCHRUN)
@pytest.mark.parametrize("how", ["flag", "underscores", "variable"])
def test_torchruns_flags_are_read_as_torchrun_reads_them(
    flag: str, value: str | None, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not there(flag):
        assert flag in NOT_IN_EACH_TORCH
        return
    program = ["train.py", "--lr", "0.1", "--role", "mine"]
    words = [f"--{flag}", *([] if value is None else [value])]
    if how == "underscores":
        words[0] = f"--{flag.replace('-', '_')}"
    if how == "variable":
        monkeypatch.setenv(f"PET_{flag.replace('-', '_').upper()}", value or "1")
        words = []
    ours, theirs = parse([*words, *program]), torchrun.parse_args([*words, *program])
    assert of_torch(ours.arguments) == vars(theirs)
    assert ours.roles == ()


def test_without_flags_all_is_as_torchrun_has_it() -> None:
    ours, theirs = parse(["train.py"]), torchrun.parse_args(["train.py"])
    assert of_torch(ours.arguments) == vars(theirs)


def test_roles_are_taken_one_by_one_and_the_program_keeps_its_own_flags() -> None:
    line = "--standalone --role ps:2,service --role trainer:4,max_restarts=3 train.py --role x:1"
    command = parse(shlex.split(line))
    assert command.roles == (Role("ps", 2, service=True), Role("trainer", 4, max_restarts=3))
    assert command.arguments.role == ROLE_OF_JOB
    assert command.arguments.training_script == "train.py"
    assert command.arguments.training_script_args == ["--role", "x:1"]


def test_the_last_of_torchruns_roles_counts() -> None:
    assert parse(["--role", "a", "--role", "b", "train.py"]).arguments.role == "b"


def test_roles_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PET_ROLE", "ps:1,service trainer:2")
    assert [role.name for role in parse(["train.py"]).roles] == ["ps", "trainer"]
    assert [role.name for role in parse(["--role", "x:1", "train.py"]).roles] == ["x"]
    monkeypatch.setenv("PET_SPARE", "2")
    assert parse(["train.py"]).arguments.spare == 2


@pytest.mark.parametrize(
    ("line", "error", "problem"),
    [
        ("--role ps:2 --role trainer t.py", RoleError, "'trainer' has no COUNT"),
        ("--role ps:2 --role ps:3 t.py", RoleError, "'ps' is given twice"),
        ("--role ps:2 -r 4 t.py", FlagError, "--redirects=4: give 0, 1"),
        ("--role ps:2 -t ps: t.py", FlagError, "--tee=ps:: give 0, 1"),
        ("--role ps:2 -t trainer:3 t.py", FlagError, "--tee names the role 'trainer'"),
        ("--role ps:2 --local-ranks-filter , t.py", FlagError, "give local ranks or roles"),
        ("--role ps:2 --local-ranks-filter x t.py", FlagError, "the roles are: ps"),
        ("--role ps:2 --spare -1 t.py", FlagError, "--spare=-1 is negative"),
    ],
)
def test_a_wrong_value_is_named(line: str, error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as raised:
        parse(shlex.split(line))
    assert problem in str(raised.value)


def test_a_program_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["--role", "ps:2"])
    assert "training_script" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "streams"),
    [
        ("3", Streams(Std.ALL)),
        ("0", Streams()),
        ("0:1,12:3", Streams(by_rank={0: Std.OUT, 12: Std.ALL})),
        ("trainer:2,10:0", Streams(by_rank={10: Std.NONE}, by_role={"trainer": Std.ERR})),
    ],
)
def test_streams_are_given_for_all_for_ranks_or_for_roles(text: str, streams: Streams) -> None:
    assert parse_streams("-r", text) == streams


def test_the_rank_counts_more_than_the_role() -> None:
    streams = Streams(Std.OUT, {10: Std.NONE}, {"ps": Std.ERR})
    assert [streams.of("ps", 10), streams.of("ps", 1), streams.of("trainer", 1)] == [
        Std.NONE,
        Std.ERR,
        Std.OUT,
    ]


def test_the_terminal_shows_whom_it_is_told_to() -> None:
    assert parse_shown("") == Shown()
    assert Shown().has("ps", 7)
    shown = parse_shown("0,12,ps")
    assert [shown.has("ps", 7), shown.has("trainer", 12), shown.has("trainer", 1)] == [
        True,
        True,
        False,
    ]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--start-method", "fork"), Forking.ALL),
        (("--start-method", "spawn"), Forking.NOBODY),
        ((), Forking.SERVERS),
        (("--dropin",), Forking.NOBODY),
    ],
)
def test_servers_of_our_own_are_forked_and_others_on_request(
    flags: tuple[str, ...], wanted: Forking
) -> None:
    servers = ("--role", "ps:1,service=tensorwire.parameter_server", "--role", "trainer:1")
    assert parse([*flags, *servers, "train.py"]).forking is wanted
    if not flags:
        assert parse(["--role", "ps:1,service=mine", "train.py"]).forking is Forking.NOBODY
        assert parse(["train.py"]).forking is Forking.NOBODY


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (("--start-method=fork", "--dropin"), "--start-method=fork: with --dropin"),
        (("--warm=-1",), "--warm=-1 is negative"),
        (("--warm=1", "--dropin"), "--warm=1 is not for --dropin"),
        (("--warm=1", "--no-python"), "--warm=1 is not for --no-python"),
        (("--warm=1", "--start-method=fork"), "--warm=1 is not needed with --start-method=fork"),
    ],
)
def test_ways_to_start_that_exclude_each_other_are_named(
    flags: tuple[str, ...], wanted: str
) -> None:
    with pytest.raises(FlagError, match=re.escape(wanted)):
        parse([*flags, "--role", "trainer:1", "train.py"])


@pytest.mark.parametrize("flag", ["--warm=1", "--exit-codes=fail:2"])
def test_flags_for_roles_are_refused_without(flag: str) -> None:
    with pytest.raises(FlagError, match="is for roles, of which none is given"):
        parse([flag, "train.py"])
