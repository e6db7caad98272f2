"""Certificates for the workers of a run with TLS, by an authority that lives as long as it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rpc

_ROTATE_SECONDS = 2.0


class Authority:
    """Issues a certificate to each worker, a new one whenever the worker starts."""

    def __init__(self) -> None:
        import trustme

        self._authority = trustme.CA(key_type=trustme.KeyType.ECDSA)
        self._kind = trustme.KeyType.ECDSA

    def issue(self, name: str, folder: Path) -> None:
        leaf = self._authority.issue_cert(name, key_type=self._kind)
        chain = b"".join(each.bytes() for each in leaf.cert_chain_pems)
        _replace(folder / f"{name}.pem", chain)
        _replace(folder / f"{name}.key", leaf.private_key_pem.bytes())
        _replace(folder / "ca.pem", self._authority.cert_pem.bytes())


def with_tls(name: str, folder: Path) -> dict[str, Any]:
    """Returns the options of a worker that encrypts everything."""
    tls = rpc.TlsOptions(
        certificate=folder / f"{name}.pem",
        private_key=folder / f"{name}.key",
        ca=folder / "ca.pem",
        rotate_every=_ROTATE_SECONDS,
    )
    return {"tls": tls, "local_paths": False}


def _replace(file: Path, content: bytes) -> None:
    """Writes a file that others may be reading."""
    other = file.with_suffix(file.suffix + ".new")
    other.write_bytes(content)
    os.chmod(other, 0o600)
    os.replace(other, file)
