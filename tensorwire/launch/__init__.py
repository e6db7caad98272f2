"""``rpcrun``: starts the workers of a job, which have roles, and starts again what died.

For a launcher of your own there is :class:`RoleAgent`, which stands where torch's
``LocalElasticAgent`` does.
"""

from tensorwire.launch.agent import Output, RoleAgent
from tensorwire.launch.events import EventHandler, NullEventHandler
from tensorwire.launch.flags import Shown, Streams
from tensorwire.launch.rendezvous import TensorWireRendezvous
from tensorwire.launch.roles import Restart, Role, RoleError, Share, parse_role

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
