"""The command line of rpcrun: torchrun's, and what it says of roles.

Every flag of torchrun comes from the parser of the torch that is installed, ``PET_*``
variables included. Decides what was asked for; starts nothing.
"""

from __future__ import annotations

import argparse
import enum
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.distributed.argparse_util import check_env, env
from torch.distributed.elastic.multiprocessing import Std
from torch.distributed.run import get_args_parser

import rpc
from tensorwire.launch.exits import ExitRules, parse_exit_codes
from tensorwire.launch.job_file import JobFile, read_job_file
from tensorwire.launch.roles import Role, RoleError, check_roles, has_count, parse_role

_NO_PROGRAM = "\0"
_STREAMS = re.compile(r"[0-3]")
_ROLE_OF_TORCHRUN = "default"
_METHODS = ("spawn", "fork", "forkserver")

ROLE_OF_JOB = "rpc"
"""The name of the workers of all roles together in events and metrics of torch's."""


class FlagError(ValueError):
    """A flag has a value that cannot be; names it."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The output streams that each worker writes to files.

    Args:
        everyone: of the workers that the others do not name.
        by_rank: by local rank, which counts the workers of one role on one agent.
        by_role: by role; the local rank counts more.
    """

    everyone: Std = Std.NONE
    by_rank: Mapping[int, Std] = field(default_factory=dict)
    by_role: Mapping[str, Std] = field(default_factory=dict)

    def of(self, role: str, local_rank: int) -> Std:
        """The streams of one worker."""
        chosen = self.by_rank.get(local_rank)
        return self.by_role.get(role, self.everyone) if chosen is None else chosen


@dataclass(frozen=True, slots=True)
class Shown:
    """The workers whose output the terminal shows; without any named, all of them.

    Args:
        ranks: local ranks.
        roles: names of roles.
    """

    ranks: frozenset[int] = frozenset()
    roles: frozenset[str] = frozenset()

    def has(self, role: str, local_rank: int) -> bool:
        """True if the output of this worker is shown."""
        anybody = not (self.ranks or self.roles)
        return anybody or local_rank in self.ranks or role in self.roles


class Forking(enum.Enum):
    """The workers that are forked off a template, which has imported what they import."""

    NOBODY = "nobody"
    SERVERS = "servers"
    """Those that run a module of TensorWire's own."""
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Command:
    """All that was asked for.

    Args:
        arguments: as torchrun's parser gives them, of which ``role`` is one text again.
        roles: the roles; none where rpcrun does what torchrun does.
        redirects: what goes to files.
        tee: what goes to files and to the terminal.
        shown: whose output the terminal shows.
        forking: the workers that are forked off a template.
        exit_codes: which ends are worth a restart.
    """

    arguments: argparse.Namespace
    roles: tuple[Role, ...]
    redirects: Streams
    tee: Streams
    shown: Shown
    forking: Forking
    exit_codes: ExitRules


class _Roles(argparse.Action):
    """Takes ``--role`` several times; before the first, what ``PET_ROLE`` says counts."""

    def __init__(self, dest: str, default: object = None, **kwargs: object) -> None:
        default = os.environ.get("PET_ROLE", _ROLE_OF_TORCHRUN).split()
        super().__init__(dest=dest, default=default, **kwargs)  # type: ignore[arg-type]

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        given = getattr(namespace, self.dest)
        former = [] if given is self.default else given
        setattr(namespace, self.dest, [*former, values])


def make_parser() -> argparse.ArgumentParser:
    """Torchrun's parser, with what rpcrun adds to it."""
    parser = get_args_parser()
    parser.prog = "rpcrun"
    parser.description = "Starts the workers of a job, which have roles, and again what died."
    parser._optionals.conflict_handler = "resolve"  # our --role takes the place of torchrun's
    add = parser.add_argument
    add("--role", action=_Roles, help="NAME:COUNT[/job][,service[=MODULE]][,max_restarts=N]"
        "[,restart=worker|role|job][,pg]: workers of this role, on each agent or in all; may be "
        "repeated. NAME alone is torchrun's: a name for all workers")  # fmt: skip
    add("--spare", action=env, type=int, default=0, help="Seats of each agent for workers of an "
        "agent that died (%(default)s)")  # fmt: skip
    add("--job", action=env, default=None, help="YAML or TOML file with flags, roles and the "
        "program; what the command line says as well counts more")  # fmt: skip
    add("--group-key-file", "--group_key_file", action=env, default=None, help="File of mode 0600 "
        "with the key of the workers' group, the same on each machine; on one machine a key is "
        "made for the job")  # fmt: skip
    add("--start-method", "--start_method", action=env, type=str, default=None, choices=_METHODS,
        help="fork: all workers in Python are forked off a process that imported torch and rpc; "
        "spawn: each is started by a command; forkserver: as torchrun does it with --run-path. "
        "Default: servers of service=tensorwire.* are forked, others are not")  # fmt: skip
    add("--warm", action=env, type=int, default=0, help="Processes of each agent that have "
        "imported torch and rpc and wait to take the place of a worker that died "
        "(%(default)s)")  # fmt: skip
    add("--exit-codes", "--exit_codes", action=env, default="", help="The ends of workers "
        "that are worth a restart, and those that end the job: retry:137,139;fail:2. 128 + N is "
        "signal N, * all others. Default: all, but for a worker that fails twice in the same way "
        "before it joins its group")  # fmt: skip
    add("--insecure", action=check_env, help="Listen beyond this machine without a group key")
    add("--dropin", action=check_env, help="In the workers, torch.distributed.rpc stands for "
        "TensorWire; see tensorwire.dropin")  # fmt: skip
    add("--dashboard", action=env, default="", metavar="[HOST:]PORT", help="Serve a page on which "
        "the job can be watched, at 127.0.0.1 unless HOST says otherwise; needs "
        "tensorwire[dashboard]")  # fmt: skip
    add("--dashboard-tls", "--dashboard_tls", action=env, default="", metavar="CERT,KEY", help=
        "Files with certificate and key of that page; beyond this machine it is served by TLS "
        "only, or with --insecure")  # fmt: skip
    add("--stall-timeout", "--stall_timeout", action=env, type=float, default=None, help="Seconds "
        "without a step after which a worker is suspected to stand still, unless it was slower "
        "before; 0 looks for none (120, after a minute of history)")  # fmt: skip
    add("--restart-stalled", "--restart_stalled", action=check_env, help="Kill workers that stand "
        "still and for which others wait, so that they start again")  # fmt: skip
    add(
        "--version", action="version", version=f"rpcrun {rpc.__version__}", help="Print the version"
    )
    add("--dry-run", "--dry_run", action=check_env, help="Print what would be started, and end")
    return parser


def parse(argv: Sequence[str]) -> Command:
    """Reads the command line, and the job file that it names.

    Args:
        argv: the command line without the name of the launcher.

    Raises:
        RoleError: the roles are not valid.
        JobFileError: the job file cannot be read.
        FlagError: another flag is not valid.
        SystemExit: the parser of torchrun, which also prints why, does not accept it.
    """
    parser = make_parser()
    given = parser.parse_args([*argv, _NO_PROGRAM])
    job = JobFile((), (), ())
    if given.job:
        job = read_job_file(given.job, _known_flags(parser))
    count = len(given.training_script_args) + 1
    flags, program = argv[: len(argv) + 1 - count], argv[len(argv) + 1 - count :]
    arguments = parser.parse_args([*job.flags, *flags, *(program or job.program)])
    said = arguments.role
    arguments.role, roles = _roles(said, job.roles)
    forking = _forking(arguments, roles)
    arguments.start_method = arguments.start_method or _METHODS[0]
    _check_watching(arguments)
    if arguments.spare < 0:
        raise FlagError(f"--spare={arguments.spare} is negative")
    _check_warm(arguments, roles, forking)
    exit_codes = parse_exit_codes(arguments.exit_codes)
    if arguments.exit_codes and not roles:
        raise FlagError(f"--exit-codes={arguments.exit_codes} is for roles, of which none is given")
    command = Command(
        arguments,
        roles,
        parse_streams("--redirects", arguments.redirects),
        parse_streams("--tee", arguments.tee),
        parse_shown(arguments.local_ranks_filter),
        forking,
        exit_codes,
    )
    _check_names(command)
    return command


def _forking(said: argparse.Namespace, roles: Sequence[Role]) -> Forking:
    if said.start_method == "fork" and roles:
        if said.dropin:
            raise FlagError(
                "--start-method=fork: with --dropin a worker's torch is another from its first "
                "import on, so it cannot be forked; leave one of the two out"
            )
        return Forking.ALL
    is_wanted = said.start_method is None and any(role.is_of_tensorwire for role in roles)
    return Forking.SERVERS if is_wanted and not said.dropin else Forking.NOBODY


def _check_watching(arguments: argparse.Namespace) -> None:
    least = arguments.stall_timeout
    if least is not None and not 0 <= least < math.inf:
        raise FlagError(f"--stall-timeout={least:g} must be seconds, 0 for none")
    if arguments.restart_stalled and least == 0:
        raise FlagError("--restart-stalled needs a --stall-timeout above 0")
    if arguments.dashboard and not re.fullmatch(r"(\S+:)?\d{1,5}", arguments.dashboard):
        raise FlagError(
            f"--dashboard={arguments.dashboard}: give [HOST:]PORT, such as 8265 or 10.0.0.1:8265"
        )
    if arguments.dashboard_tls and arguments.dashboard_tls.count(",") != 1:
        raise FlagError(
            f"--dashboard-tls={arguments.dashboard_tls}: give two files, CERTIFICATE,KEY"
        )


def _check_warm(said: argparse.Namespace, roles: Sequence[Role], forking: Forking) -> None:
    excluded = {
        "is negative": said.warm < 0,
        "is for roles, of which none is given": said.warm and not roles,
        "is not for --dropin, with which a worker's torch is another from its first import on": (
            said.warm and said.dropin
        ),
        "is not for --no-python, as what they have imported is Python's": (
            said.warm and said.no_python
        ),
        "is not needed with --start-method=fork, which starts workers as fast": (
            said.warm and forking is Forking.ALL
        ),
    }
    for problem, is_there in excluded.items():
        if is_there:
            raise FlagError(f"--warm={said.warm} {problem}")


def _known_flags(parser: argparse.ArgumentParser) -> dict[str, bool]:
    flags: dict[str, bool] = {}
    for action in parser._actions:
        for option in action.option_strings:
            if option.startswith("--") and action.dest not in ("help", "role", "job", "module"):
                flags[option[2:].replace("-", "_")] = action.nargs != 0
    return flags


def _roles(said: Sequence[str], of_file: Sequence[Role]) -> tuple[str, tuple[Role, ...]]:
    """The role in torchrun's sense, and ours; the command line's replace those of the file."""
    counted = [text for text in said if has_count(text)]
    bare = [text for text in said if not has_count(text)]
    if not counted and not of_file:
        return bare[-1], ()
    if counted and bare:
        raise RoleError(f"role {bare[0]!r} has no COUNT, as the others have: {bare[0]}:COUNT")
    given = [parse_role(text) for text in counted]
    names = {role.name for role in given}
    return ROLE_OF_JOB, check_roles([*(r for r in of_file if r.name not in names), *given])


def parse_streams(flag: str, text: str) -> Streams:
    """Reads ``-r`` or ``-t``: ``3``, or ``0:1,12:3``, or with roles for ranks ``trainer:3``.

    Args:
        flag: its name, for errors.
        text: its value; the numbers are 0 for none, 1 for stdout, 2 for stderr, 3 for both.

    Raises:
        FlagError: it is of another form.
    """
    if _STREAMS.fullmatch(text):
        return Streams(Std(int(text)))
    by_rank: dict[int, Std] = {}
    by_role: dict[str, Std] = {}
    for part in text.split(","):
        who, colon, streams = part.rpartition(":")
        if not colon or not who or not _STREAMS.fullmatch(streams):
            raise FlagError(
                f"{flag}={text}: give 0, 1 (stdout), 2 (stderr) or 3 (both) for all workers, or "
                "LOCAL_RANK:N or ROLE:N for some, separated by commas"
            )
        if who.isdecimal():
            by_rank[int(who)] = Std(int(streams))
        else:
            by_role[who] = Std(int(streams))
    return Streams(Std.NONE, by_rank, by_role)


def parse_shown(text: str) -> Shown:
    """Reads ``--local-ranks-filter``: local ranks and roles, separated by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if text and not parts:
        raise FlagError(f"--local-ranks-filter={text}: give local ranks or roles, as in 0,1,ps")
    ranks = frozenset(int(part) for part in parts if part.isdecimal())
    return Shown(ranks, frozenset(part for part in parts if not part.isdecimal()))


def _check_names(command: Command) -> None:
    known = {role.name for role in command.roles}
    named = [
        ("--redirects", command.redirects.by_role),
        ("--tee", command.tee.by_role),
        ("--local-ranks-filter", command.shown.roles),
    ]
    for flag, names in named:
        for name in sorted(set(names) - known):
            there = ", ".join(sorted(known)) or "none"
            raise FlagError(f"{flag} names the role {name!r}; the roles are: {there}")
