"""``rpcrun``: starts the workers of a job, which have roles, and starts again what died.

For a launcher of your own there is :class:`RoleAgent`, which stands where torch's
``LocalElasticAgent`` does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tensorwire.launch.roles import Restart, Role, RoleError, Share, parse_role

if TYPE_CHECKING:
    from tensorwire.launch.agent import RoleAgent
    from tensorwire.launch.events import EventHandler, NullEventHandler
    from tensorwire.launch.flags import Shown, Streams
    from tensorwire.launch.logs import Output
    from tensorwire.launch.rendezvous import TensorWireRendezvous

__all__ = [
    "EventHandler",
    "NullEventHandler",
    "Output",
    "Restart",
    "Role",
    "RoleAgent",
    "RoleError",
    "Share",
    "Shown",
    "Streams",
    "TensorWireRendezvous",
    "parse_role",
]

_MODULES = {
    "EventHandler": "events",
    "NullEventHandler": "events",
    "Output": "logs",
    "RoleAgent": "agent",
    "Shown": "flags",
    "Streams": "flags",
    "TensorWireRendezvous": "rendezvous",
}
"""The modules of names that are loaded when somebody asks for them.

Torch imports this package for the rendezvous' entry point, in the middle of its own import, when
what these modules import of torch is not there yet.
"""


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return getattr(importlib.import_module(f"tensorwire.launch.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
