"""Parts that stand on ``rpc``: parameter server, pipelines, checkpoints, launcher, integrations.

Each lives in a package of its own, which is imported by its name, as in
``from tensorwire import parameter_server``.
"""

from rpc import __version__ as __version__

__all__ = ["__version__"]
