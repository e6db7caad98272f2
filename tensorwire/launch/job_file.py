"""Job files: what ``rpcrun --job job.yaml`` reads in place of a long command line.

Owns the form of such a file, in YAML or TOML. Every flag of rpcrun may stand in it, under its
name with ``_`` for ``-``; what the command line says as well counts more::

    nnodes: 1:4
    max_restarts: 3
    program: train.py          # or module: my.train
    args: [--lr, 0.1]
    roles:
      ps: {count: 2, service: true}
      trainer: {count: 4, restart: worker}
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tensorwire.launch.roles import Role, RoleError, Share, make_role

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_OF_PROGRAM = ("program", "module", "args", "roles")
_OF_ROLE = ("count", "args")


class JobFileError(ValueError):
    """A job file cannot be read, or says something that cannot be; names the file."""


@dataclass(frozen=True, slots=True)
class JobFile:
    """The contents of a job file, as the command line would say them.

    Args:
        flags: the flags, without roles.
        roles: the roles.
        program: the program, with ``-m`` before a module, and its arguments; may be empty.
    """

    flags: tuple[str, ...]
    roles: tuple[Role, ...]
    program: tuple[str, ...]


def read_job_file(path: str, known: Mapping[str, bool]) -> JobFile:
    """Reads a job file.

    Args:
        path: ends in ``.yaml``, ``.yml`` or ``.toml``.
        known: the flags that there are, with ``_`` for ``-``; True for one that takes a value.

    Raises:
        JobFileError: there is no such file, or what it says cannot be.
    """
    try:
        content = _load(Path(path))
        roles = [_role(name, says) for name, says in _mapping("roles", content).items()]
        flags = _flags(content, known)
        program = _program(content)
    except (OSError, ValueError) as error:
        raise JobFileError(f"job file {path!r}: {error}") from error
    return JobFile(tuple(flags), tuple(roles), tuple(program))


def _load(path: Path) -> Mapping[str, Any]:
    if path.suffix == ".toml":
        loaded: Mapping[str, Any] = tomllib.loads(path.read_text())
        return loaded
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError("its name must end in .yaml, .yml or .toml")
    try:
        import yaml
    except ImportError:
        raise ValueError("YAML needs PyYAML: pip install 'tensorwire[launch]'") from None
    try:
        # Everything is text to this loader; to the others 1:4 is 64.
        content = yaml.load(path.read_text(), yaml.BaseLoader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    if not isinstance(content, Mapping):
        raise ValueError("it must be a mapping")
    return content


def _mapping(key: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
    value = content.get(key, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{key} must be a mapping, but is {value!r}")
    return value


def _text(key: str, value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str | int | float):
        return str(value)
    raise ValueError(f"{key} must be a text or a number, but is {value!r}")


def _texts(key: str, content: Mapping[str, Any]) -> list[str]:
    value = content.get(key, [])
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise ValueError(f"{key} must be a list, but is {value!r}")
    return [_text(key, each) for each in value]


def _is_on(key: str, value: str) -> bool:
    if value.lower() not in ("true", "false"):
        raise ValueError(f"{key} must be true or false, but is {value!r}")
    return value.lower() == "true"


def _flags(content: Mapping[str, Any], known: Mapping[str, bool]) -> list[str]:
    flags: list[str] = []
    for key, value in content.items():
        if key in _OF_PROGRAM:
            continue
        if key not in known:
            raise ValueError(f"there is no flag {key!r}")
        flag = f"--{key.replace('_', '-')}"
        if isinstance(value, list):
            flags += [flag, ",".join(_text(key, each) for each in value)]
        elif known[key]:
            flags += [flag, _text(key, value)]
        elif _is_on(key, _text(key, value)):
            flags.append(flag)
    return flags


def _program(content: Mapping[str, Any]) -> list[str]:
    arguments = _texts("args", content)
    if "program" in content and "module" in content:
        raise ValueError("program and module exclude each other")
    if "module" in content:
        return ["-m", _text("module", content["module"]), *arguments]
    if "program" in content:
        return [_text("program", content["program"]), *arguments]
    if arguments:
        raise ValueError("args without a program or a module")
    return []


def _role(name: str, says: object) -> Role:
    if not isinstance(says, Mapping) or "count" not in says:
        raise RoleError(f"role {name!r} must be a mapping with a count, but is {says!r}")
    number, slash, of_job = _text("count", says["count"]).partition("/")
    if not number.isdecimal() or (slash and of_job != "job"):
        raise RoleError(f"role {name!r}: count={says['count']!r} must be COUNT or COUNT/job")
    options = {
        key: value
        for key, each in says.items()
        if key not in _OF_ROLE and (value := _text(key, each)) != "false"
    }
    given = {key: None if value == "true" else value for key, value in options.items()}
    role = make_role(name, int(number), Share.JOB if slash else Share.AGENT, given)
    arguments = _texts("args", says)
    if arguments and role.module is None:
        raise RoleError(f"role {name!r}: args belong to a service=MODULE; this role has none")
    return replace(role, arguments=tuple(arguments))
