"""A parameter server: tables and dense parameters kept by several servers for several trainers.

Rooms: ``decisions`` is the protocol, without I/O.
"""

from tensorwire.parameter_server.decisions.consistency import BSP, SSP, Async, Reduce
from tensorwire.parameter_server.embedding import Embedding, EmbeddingBag

__all__ = ["BSP", "SSP", "Async", "Embedding", "EmbeddingBag", "Reduce"]
