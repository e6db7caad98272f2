"""A parameter server: tables and dense parameters kept by several servers for several trainers.

Rooms, upper ones first: ``client`` and ``server`` do what was decided and meet in ``messaging``;
``storage`` keeps a shard's state; ``rows`` is memory for rows and their index; ``declarations``
says what tables are; ``decisions`` is the protocol, without I/O; ``kernels`` are the loops.
"""

from tensorwire.parameter_server.client.cache import Cache
from tensorwire.parameter_server.client.cluster import Cluster
from tensorwire.parameter_server.client.collection import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    Feature,
    KeyedTensor,
)
from tensorwire.parameter_server.client.connecting import connect
from tensorwire.parameter_server.client.converting import convert
from tensorwire.parameter_server.client.counted import Progress
from tensorwire.parameter_server.client.dense import DenseGroup
from tensorwire.parameter_server.client.embedding import Embedding, EmbeddingBag
from tensorwire.parameter_server.client.exchange import Gradients
from tensorwire.parameter_server.client.file_reading import File
from tensorwire.parameter_server.client.files import Files
from tensorwire.parameter_server.client.optimizer import Optimizer, Pushing, TrainerOptimizer
from tensorwire.parameter_server.client.prefetch import prefetch
from tensorwire.parameter_server.client.publishing import Publishing, Seconds, Steps
from tensorwire.parameter_server.client.reader import Reader, WholeStep
from tensorwire.parameter_server.client.samples import Position, Samples
from tensorwire.parameter_server.client.saving import Saving
from tensorwire.parameter_server.client.stepper import NanPolicy
from tensorwire.parameter_server.client.table import Table
from tensorwire.parameter_server.client.tracking import Tracked
from tensorwire.parameter_server.decisions.consistency import BSP, SSP, Async, Reduce
from tensorwire.parameter_server.declarations.initialisers import (
    Constant,
    Initialiser,
    Normal,
    Uniform,
)
from tensorwire.parameter_server.declarations.lifetimes import MinCount, UnusedFor
from tensorwire.parameter_server.declarations.rules import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Per,
    RowwiseAdagrad,
    Rule,
)
from tensorwire.parameter_server.declarations.spec import Precision
from tensorwire.parameter_server.declarations.wire import (
    BFloat16,
    Float16,
    Float32,
    Int8,
    TopK,
    Wire,
)
from tensorwire.parameter_server.errors import (
    DeclarationError,
    GradientError,
    NotATrainerError,
    OutOfMemoryError,
    ParameterServerError,
    RestoreError,
    RolledBack,
    ServerLostError,
    SnapshotError,
    UnreachableError,
)
from tensorwire.parameter_server.extracting import extract
from tensorwire.parameter_server.following.model import (
    FollowedModel,
    FollowedTable,
    FollowedView,
    follow,
)
from tensorwire.parameter_server.hashing import hashed
from tensorwire.parameter_server.reading import read
from tensorwire.parameter_server.server.host import metrics, serve

__all__ = [
    "BSP",
    "FTRL",
    "SGD",
    "SSP",
    "Adagrad",
    "Adam",
    "Async",
    "BFloat16",
    "Cache",
    "Cluster",
    "Constant",
    "DeclarationError",
    "DenseGroup",
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "Feature",
    "File",
    "Files",
    "Float16",
    "Float32",
    "FollowedModel",
    "FollowedTable",
    "FollowedView",
    "GradientError",
    "Gradients",
    "Initialiser",
    "Int8",
    "KeyedTensor",
    "MinCount",
    "NanPolicy",
    "Normal",
    "NotATrainerError",
    "Optimizer",
    "OutOfMemoryError",
    "ParameterServerError",
    "Per",
    "Position",
    "Precision",
    "Progress",
    "Publishing",
    "Pushing",
    "Reader",
    "Reduce",
    "RestoreError",
    "RolledBack",
    "RowwiseAdagrad",
    "Rule",
    "Samples",
    "Saving",
    "Seconds",
    "ServerLostError",
    "SnapshotError",
    "Steps",
    "Table",
    "TopK",
    "Tracked",
    "TrainerOptimizer",
    "Uniform",
    "UnreachableError",
    "UnusedFor",
    "WholeStep",
    "Wire",
    "connect",
    "convert",
    "extract",
    "follow",
    "hashed",
    "metrics",
    "prefetch",
    "read",
    "serve",
]
