"""Makes the samplers of a cluster, which declare what trainers train."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

from tensorwire.parameter_server import errors
from tensorwire.parameter_server.client.files import Files
from tensorwire.parameter_server.client.samples import Samples
from tensorwire.parameter_server.client.sources import digest_of, pickles_of, require_distinct
from tensorwire.parameter_server.client.static_share import Share
from tensorwire.parameter_server.declarations.samplers import SamplerSpec

if TYPE_CHECKING:
    from tensorwire.parameter_server.client.cluster import Cluster

_NO_LIST: Final = (str, bytes, bytearray, memoryview)
"""Sequences whose elements are not what is meant."""


class SamplerArguments(NamedTuple):
    """The arguments that batches and files have alike; see ``Cluster.samples``."""

    name: str
    shuffle: bool
    seed: int
    epochs: int
    share: Share


def batches_of(
    cluster: Cluster,
    length: int | None,
    batch_size: int | None,
    drop_last: bool | None,
    about: SamplerArguments,
) -> Samples:
    """A sampler of batches.

    Raises:
        TypeError: an argument is missing, or of a wrong kind.
    """
    if length is None or batch_size is None:
        raise TypeError(
            f"samples: length={length!r} and batch_size={batch_size!r} must both be given, or "
            "files= in their place"
        )
    name, shuffle, seed, epochs, share = about
    drops = False if drop_last is None else drop_last
    replicas = share.num_replicas
    spec = SamplerSpec(name, length, batch_size, shuffle, seed, epochs, drops, replicas)
    _declare(cluster, spec)
    return Samples(cluster, spec, share.rank)


def files_of(cluster: Cluster, files: Sequence[object], about: SamplerArguments) -> Files:
    """A sampler of files.

    Raises:
        TypeError: they are no sequence, or one cannot be pickled.
        ValueError: there is none, or one is there twice.
    """
    is_list = isinstance(files, Sequence) and not isinstance(files, _NO_LIST)
    if not is_list:
        raise TypeError(
            f"samples: files={files!r} is a {type(files).__name__}, not a list of sources, such as "
            "paths"
        )
    if not files:
        raise ValueError(f"samples: files={files!r} must have at least one source")
    name, shuffle, seed, epochs, share = about
    pickles, replicas = pickles_of(files), share.num_replicas
    digest = digest_of(pickles)
    spec = SamplerSpec(name, len(files), 1, shuffle, seed, epochs, False, replicas, digest)
    require_distinct(files, pickles)
    _declare(cluster, spec)
    return Files(cluster, spec, tuple(files), share.rank)


def require_no_batches(length: int | None, batch_size: int | None, drop_last: bool | None) -> None:
    """Refuses arguments that are about batches beside files.

    Raises:
        ValueError: something is.
    """
    if length is not None:
        raise ValueError(f"samples: length={length!r} is given beside files=; give one of the two")
    for name, value in {"batch_size": batch_size, "drop_last": drop_last}.items():
        if value is not None:
            raise ValueError(
                f"samples: {name}={value!r} is given beside files=; the loader that reads the "
                "files makes the batches, so say it there"
            )


def _declare(cluster: Cluster, spec: SamplerSpec) -> None:
    """Has the samples counted, unless others have said otherwise of them."""
    cluster.join()
    agreed = SamplerSpec.decode(cluster.counting.begin(spec.name, spec.encode()))
    differences = spec.differences(agreed)
    if differences:
        raise errors.DeclarationError(
            f"sampler {spec.name!r} was declared otherwise before: {'; '.join(differences)}"
        )
