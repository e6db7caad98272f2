"""The roles of a job, as rpcrun tells each worker in ``RPC_ROLES``. Pure: reads a text.

Decides which worker of a job may still come, and why one never will.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

VARIABLE: Final = "RPC_ROLES"


@dataclass(frozen=True, slots=True)
class JobRole:
    """The number of workers of a role.

    Args:
        started: that there were when this worker started.
        most: that there can ever be.
    """

    started: int
    most: int


@dataclass(frozen=True, slots=True)
class JobRoles:
    """The roles of a job, by name; none where no launcher has told of any."""

    roles: Mapping[str, JobRole] = field(default_factory=dict)

    @classmethod
    def of(cls, variables: Mapping[str, str]) -> JobRoles:
        """Reads them from a worker's environment.

        Raises:
            ValueError: the variable is of another form.
        """
        text = variables.get(VARIABLE, "")
        try:
            return cls(dict(map(_role, text.split(","))) if text else {})
        except ValueError:
            raise ValueError(
                f"environment variable {VARIABLE}={text!r} is not of the form NAME=STARTED/MOST,..."
            ) from None

    def encode(self) -> str:
        """The inverse of :meth:`of`: the variable's value."""
        told = (f"{name}={role.started}/{role.most}" for name, role in self.roles.items())
        return ",".join(told)

    def refusal(self, name: str, members: Iterable[str]) -> str:
        """The reason for which no worker of that name will ever come; empty if one may.

        Args:
            name: of a worker that is no member now.
            members: names of those that are.
        """
        role, _, number = name.rpartition(":")
        known = self.roles.get(role)
        if not self.roles or (known and number.isdecimal() and int(number) < known.most):
            return ""
        here = {*members, *(f"{each}:0" for each in self.roles)}
        if known:
            problem = f"role {role!r} has at most {known.most} workers, numbered from 0"
            return f"there is no worker {name!r} in this job: {problem}"
        possible = {*here, *(f"{each}:{number}" for each in self.roles if number.isdecimal())}
        near = difflib.get_close_matches(name, sorted(possible), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"its roles are {', '.join(self.roles)}"
        return f"there is no worker {name!r} in this job; {hint}"


def _role(text: str) -> tuple[str, JobRole]:
    name, _, numbers = text.partition("=")
    started, _, most = numbers.partition("/")
    return name, JobRole(int(started), int(most))
