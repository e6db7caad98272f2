"""The roles of a job's workers, and how each is written on the command line.

``--role NAME:COUNT[/job][,service[=MODULE]][,max_restarts=N][,restart=worker|role|job][,pg]``

Decides what is acceptable and says what is wrong with the rest. Starts nothing.
"""

from __future__ import annotations

import enum
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}")
_FORM = "NAME:COUNT[/job][,service[=MODULE]][,max_restarts=N][,restart=worker|role|job][,pg]"


class RoleError(ValueError):
    """The description of a role is not acceptable; says which and why."""


class Restart(enum.Enum):
    """The extent of what starts again when a worker of a role fails."""

    WORKER = "worker"
    ROLE = "role"
    JOB = "job"


class Share(enum.Enum):
    """The meaning of a role's COUNT: workers of each agent, or of the whole job."""

    AGENT = "agent"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class Role:
    """Workers that are all alike.

    Args:
        name: of the role; its workers are called ``NAME:0``, ``NAME:1``, ...
        count: how many there are, of each agent or of the job.
        share: which of the two.
        service: they end when the others are done, and are not waited for.
        module: what they run with ``python -m`` in place of the job's program.
        arguments: what that module is given.
        max_restarts: how often each worker may start again (the whole role, or job, where
            ``restart`` says so); None for what ``--max-restarts`` says.
        restart: how much starts again when one of them fails.
        process_group: they form a ``torch.distributed`` process group of their own.
    """

    name: str
    count: int
    share: Share = Share.AGENT
    service: bool = False
    module: str | None = None
    arguments: tuple[str, ...] = ()
    max_restarts: int | None = None
    restart: Restart = Restart.WORKER
    process_group: bool = False

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.count < 1:
            raise RoleError(f"role {self.name!r}: COUNT={self.count} must be 1 or more")
        if self.max_restarts is not None and self.max_restarts < 0:
            raise RoleError(f"role {self.name!r}: max_restarts={self.max_restarts} is negative")
        if self.process_group and self.restart is Restart.WORKER:
            raise RoleError(
                f"role {self.name!r}: a process group dies with any of its members, so pg needs "
                "restart=role, which is its default, or restart=job"
            )

    @property
    def policy(self) -> Role:
        """The role without what its workers run, which no plan holds."""
        return replace(self, module=None, arguments=())

    @property
    def runs(self) -> str:
        """A digest of what its workers run in place of the job's program."""
        return digest(self.module or "", *self.arguments)

    @property
    def is_tied(self) -> bool:
        """True if the role is formed anew whenever a worker comes or goes."""
        return self.process_group or self.restart is Restart.JOB

    @property
    def is_of_tensorwire(self) -> bool:
        """True if its workers run a module of TensorWire's own, such as the parameter server."""
        return self.module is not None and self.module.partition(".")[0] == "tensorwire"


def digest(*words: str) -> str:
    """Names some words, without telling them: other words have another digest."""
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]


def _check_name(name: str) -> None:
    if _NAME.fullmatch(name) is None:
        raise RoleError(f"role {name!r}: a name is made of letters, digits, '-' and '_'")
    if name == "rank" or name.isdecimal() or _is_device(name):
        raise RoleError(
            f"role {name!r}: RemoteModule and others would take {name + ':0'!r} for a rank or a "
            "device; choose another name"
        )


def _is_device(name: str) -> bool:
    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


def has_count(text: str) -> bool:
    """True for a role as rpcrun takes it, False for torchrun's, which is a bare name."""
    return ":" in text


def parse_role(text: str) -> Role:
    """Reads a role as it is written on the command line.

    Args:
        text: ``NAME:COUNT`` and options behind commas, such as ``"trainer:4,max_restarts=3"``.

    Raises:
        RoleError: it is of another form; says what is wrong.
    """
    name, colon, rest = text.partition(":")
    count, *options = rest.split(",")
    number, slash, of_job = count.partition("/")
    if not colon or not _is_number(number) or (slash and of_job != "job"):
        raise RoleError(f"role {text!r} is not of the form {_FORM}")
    share = Share.JOB if slash else Share.AGENT
    return make_role(name, int(number), share, dict(map(_option, options)))


def _option(text: str) -> tuple[str, str | None]:
    key, equals, value = text.partition("=")
    return key, value if equals else None


def make_role(name: str, count: int, share: Share, options: dict[str, str | None]) -> Role:
    """A role of which the options are still text.

    Args:
        name: of the role.
        count: of its workers.
        share: what is counted.
        options: by name; None for one that has no value.

    Raises:
        RoleError: an option is not known, or has a wrong value.
    """
    for key, value in options.items():
        if key not in _OPTIONS:
            raise RoleError(f"role {name!r}: there is no option {key!r}; it is {_FORM}")
        problem = _OPTIONS[key](value)
        if problem:
            raise RoleError(f"role {name!r}: {key}={value or ''} {problem}")
    process_group = "pg" in options
    restart = options.get("restart") or ("role" if process_group else "worker")
    restarts = options.get("max_restarts")
    return Role(
        name,
        count,
        share,
        service="service" in options,
        module=options.get("service"),
        max_restarts=None if restarts is None else int(restarts),
        restart=Restart(restart),
        process_group=process_group,
    )


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


def _service(value: str | None) -> str:
    return "names no module" if value == "" else ""


def _max_restarts(value: str | None) -> str:
    return "" if value and _is_number(value) else "must be a whole number from 0"


def _restart(value: str | None) -> str:
    known = [each.value for each in Restart]
    return "" if value in known else f"must be one of {', '.join(known)}"


def _pg(value: str | None) -> str:
    return "" if value is None else "takes no value"


_OPTIONS = {"service": _service, "max_restarts": _max_restarts, "restart": _restart, "pg": _pg}
"""The check of each option: says what is wrong with a value; nothing if it is right."""


def check_roles(roles: Iterable[Role]) -> tuple[Role, ...]:
    """The roles of a job, if they go together.

    Raises:
        RoleError: two have the same name, or there is none.
    """
    checked = tuple(roles)
    if not checked:
        raise RoleError("a job needs at least one role")
    names = [role.name for role in checked]
    for name in names:
        if names.count(name) > 1:
            raise RoleError(f"role {name!r} is given twice; give it once, with its whole COUNT")
    return checked
