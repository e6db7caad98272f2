"""Certificates for tests, made on the spot by an authority that lives as long as the tests."""

from __future__ import annotations

import functools
import re
import tempfile
from pathlib import Path

import trustme

from rpc.transports.tensorwire.tls import TlsOptions

_HOST_NAME = re.compile(r"[a-z0-9-]+")


@functools.cache
def authority() -> trustme.CA:
    """The one that the tests' groups trust."""
    return trustme.CA(key_type=trustme.KeyType.ECDSA)


def write(
    folder: Path, name: str, by: trustme.CA | None = None, ca: trustme.CA | None = None
) -> TlsOptions:
    """Writes a worker's files.

    Args:
        folder: where to.
        name: of the worker: a DNS name in the certificate if it can be one, or the common name.
        by: who signs its certificate; default :func:`authority`.
        ca: whom it trusts; default :func:`authority`.
    """
    signer, kind = by or authority(), trustme.KeyType.ECDSA
    if _HOST_NAME.fullmatch(name):
        leaf = signer.issue_cert(name, key_type=kind)
    else:
        leaf = signer.issue_cert("127.0.0.1", common_name=name, key_type=kind)
    certificate, key, trusted = (folder / f"worker.{end}" for end in ("pem", "key", "ca"))
    certificate.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    key.chmod(0o600)
    trusted.write_bytes((ca or authority()).cert_pem.bytes())
    return TlsOptions(certificate=certificate, private_key=key, ca=trusted)


@functools.cache
def for_everybody() -> TlsOptions:
    """Options with which any worker may be who it says it is."""
    return write(Path(tempfile.mkdtemp(prefix="tensorwire-tls-")), "*")
