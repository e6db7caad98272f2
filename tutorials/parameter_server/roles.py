"""The command line of a trainer, and what rpcrun says of the others."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

ROLES = "--role ps:2,service=tensorwire.parameter_server --role trainer:2"


@dataclass(frozen=True, slots=True)
class Place:
    """The place of this trainer among the others.

    Args:
        trainer: its number.
        trainers: how many there are.
        servers: the names of all servers.
    """

    trainer: int
    trainers: int
    servers: list[str]


def parser(
    description: str | None, module: str, output: str, roles: str = ROLES
) -> argparse.ArgumentParser:
    """A parser with the options that these programs share.

    Args:
        description: the program's docstring, whose first line ``--help`` shows.
        module: its name.
        output: folder in ``runs/`` for pictures.
        roles: rpcrun's flags, for ``--help``.
    """
    made = argparse.ArgumentParser(
        description=(description or "").splitlines()[0],
        usage=f"rpcrun --standalone {roles} -m {module} [options]",
    )
    made.add_argument("--seed", type=int, default=0, help="of everything random (%(default)s)")
    made.add_argument(
        "--output", type=Path, default=Path("runs") / output, help="folder (%(default)s)"
    )
    return made


def place(made: argparse.ArgumentParser) -> Place:
    """This process's place, as rpcrun says; ends it with a message if it was started otherwise."""
    if "ROLE_RANK" not in os.environ or "RPC_WORKER_NAME" not in os.environ:
        made.error("rpcrun starts this; see above")
    trainers = int(os.environ["ROLE_WORLD_SIZE"])
    servers = [f"ps:{number}" for number in range(int(os.environ["WORLD_SIZE"]) - trainers)]
    return Place(int(os.environ["ROLE_RANK"]), trainers, servers)
