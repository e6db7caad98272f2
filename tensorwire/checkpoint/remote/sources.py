"""Chooses where a follower's versions come from, by how the user names it."""

from __future__ import annotations

import os
from pathlib import Path

from rpc import TlsOptions
from tensorwire.checkpoint.chain import ABOUT
from tensorwire.checkpoint.following import Folder, Source
from tensorwire.checkpoint.remote.client import SCHEME, PublishedChain
from tensorwire.checkpoint.remote.keys import read_reader_key
from tensorwire.checkpoint.remote.mirror import Mirror
from tensorwire.checkpoint.remote.objects import StoredChain


def source_of(
    where: str | Path,
    key_file: str | os.PathLike[str] | None,
    tls: TlsOptions | None,
    cache: str | Path | None,
) -> Source:
    """A folder, a publisher's chain, or one in an object store.

    Args:
        where: path, ``tensorwire://host:port``, or another URL for fsspec.
        key_file: with the reader key; for a publisher alone, which needs it.
        tls: certificates; for a publisher alone.
        cache: folder for what is fetched; None for a temporary one.

    Raises:
        BringUpError: a certificate cannot be used.
        ValueError: an argument is missing, is for another kind of place, or cannot be used.
    """
    scheme, separator, _ = str(where).partition("://")
    is_publisher = bool(separator) and scheme == SCHEME
    for name, value in (("key_file", key_file), ("tls", tls)):
        if value is not None and not is_publisher:
            raise ValueError(f"follow: {name}={value!r} is for tensorwire://, not for {where!r}")
    if not separator:
        if cache is not None:
            raise ValueError(f"follow: cache={cache!r} is for URLs; {where!r} is a folder")
        if (Path(where) / ABOUT).exists():
            raise ValueError(
                f"follow: {str(where)!r} is one version; follow the folder that it is in, "
                f"{str(Path(where).parent)!r}"
            )
        return Folder(where)
    if not is_publisher:
        return Mirror(StoredChain(str(where)), cache)
    if key_file is None:
        raise ValueError(f"follow: {where} needs key_file=, a file with the reader key")
    return Mirror(PublishedChain(str(where), read_reader_key(key_file), tls), cache)
