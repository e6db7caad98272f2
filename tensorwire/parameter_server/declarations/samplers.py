"""The description of a sampler whose samples are counted: what its trainers must agree about."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from tensorwire.parameter_server.declarations.arguments import instance, text, whole

_LARGEST = 1 << 62


@dataclass(frozen=True, slots=True)
class SamplerSpec:
    """One sampler. Its batches, of all epochs, are numbered one after the other.

    With files, each of them is a batch of one sample, as far as the account is concerned.

    Args:
        name: unique in the cluster.
        length: samples in an epoch.
        batch_size: samples in a batch.
        shuffle: whether each epoch has an order of its own.
        seed: of these orders.
        epochs: how often each sample is trained.
        drop_last: whether the batch that is left at the end of an epoch is not trained.
        num_replicas: the trainers of which each has its own batches, whoever else is there; 0 if
            batches go to those who are there.
        files: the digest of the files that are the samples; empty if there are none.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument is out of range, or there is no batch.
    """

    name: str
    length: int
    batch_size: int
    shuffle: bool = False
    seed: int = 0
    epochs: int = 1
    drop_last: bool = False
    num_replicas: int = 0
    files: str = ""

    def __post_init__(self) -> None:
        text("samples", "name", self.name)
        whole("samples", "length", self.length, below=_LARGEST)
        whole("samples", "batch_size", self.batch_size)
        whole("samples", "seed", self.seed, least=0, below=1 << 64)
        whole("samples", "epochs", self.epochs, below=1 + _LARGEST // max(1, self.length))
        whole("samples", "num_replicas", self.num_replicas, least=0)
        instance("samples", "shuffle", self.shuffle, bool, "True or False")
        instance("samples", "drop_last", self.drop_last, bool, "True or False")
        if not self.in_epoch:
            raise ValueError(
                f"samples: drop_last=True leaves no batch of {self.length} samples, as "
                f"batch_size={self.batch_size}"
            )

    def encode(self) -> str:
        """Encodes it as text, for the cluster's view."""
        return json.dumps(asdict(self))

    @classmethod
    def decode(cls, text: str) -> SamplerSpec:
        """The inverse of :meth:`encode`."""
        return cls(**json.loads(text))

    def differences(self, other: SamplerSpec) -> list[str]:
        """The points in which another declaration of this sampler says otherwise."""
        if self.files or other.files:
            if not (self.files and other.files):
                return ["a length, not files" if self.files else "files, not a length"]
            if self.length != other.length:
                return [f"{other.length} files, not {self.length}"]
        return [
            "files of other pickles"
            if each.name == "files"
            else f"{each.name}={getattr(other, each.name)!r}, not {getattr(self, each.name)!r}"
            for each in fields(self)
            if getattr(self, each.name) != getattr(other, each.name)
        ]

    @property
    def in_epoch(self) -> int:
        """Batches in an epoch."""
        batches, rest = divmod(self.length, self.batch_size)
        return batches + (rest > 0 and not self.drop_last)

    @property
    def batches(self) -> int:
        """Batches in all epochs."""
        return self.epochs * self.in_epoch

    def share(self, rank: int, begin: int, end: int) -> range:
        """The batches of one of ``num_replicas`` from ``begin`` to before ``end``."""
        return range(begin + (rank - begin) % self.num_replicas, end, self.num_replicas)

    def place_of(self, number: int) -> tuple[int, int, int]:
        """The epoch of a batch, its first position in the order of the epoch, and its samples."""
        epoch, place = divmod(number, self.in_epoch)
        first = place * self.batch_size
        return epoch, first, min(self.batch_size, self.length - first)

    def samples_before(self, number: int) -> int:
        """Samples in the batches before one."""
        epoch, place = divmod(number, self.in_epoch)
        each = self.length if not self.drop_last else self.in_epoch * self.batch_size
        return epoch * each + min(place * self.batch_size, each)
