"""``rpcrun``: starts the workers of a job, which have roles, and starts again what died."""

from tensorwire.launch.roles import Restart, Role, RoleError, Share, parse_role

__all__ = ["Restart", "Role", "RoleError", "Share", "parse_role"]
