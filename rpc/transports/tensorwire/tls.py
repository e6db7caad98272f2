"""TLS between hosts: whose certificate is trusted, and for which worker.

Owns the files that :class:`TlsOptions` names, what is made of them, and the rule that a
certificate is bound to a worker's name. How bytes are encrypted is ``tls_socket``'s business.
"""

from __future__ import annotations

import logging
import math
import os
import ssl
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rpc.errors import BringUpError

_log = logging.getLogger("rpc.transports.tensorwire")

_URI = "tensorwire:"
_ANY = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Certificates for TENSORWIRE's TCP connections: both ends show one, over TLS 1.3.

    A certificate is bound to a worker's name. It carries the name as a subject alternative
    name, either a DNS name such as ``trainer0`` or a URI such as ``tensorwire:trainer:0``, or,
    if it has none of these, as its common name. A name that ends in ``*``, such as
    ``tensorwire:trainer:*``, is that of every worker whose name begins so.

    Unix sockets and shared memory between workers of one host are not encrypted. The store at
    which workers meet, and their signs of life, are not either.

    Args:
        certificate: file with this worker's certificate, and those between it and the
            authority, in PEM format.
        private_key: file with its private key, in PEM format, not encrypted.
        ca: file with the certificates of the authorities that the group trusts. Nobody else
            should be able to have certificates signed by them.
        rotate_every: seconds after which the files are read again, before the next connection
            is made. Connections that exist go on. If the files cannot be read then, the former
            certificates stay in use, and the log says why. Default 300.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: ``rotate_every`` is not positive.

    Example::

        tls = rpc.TlsOptions(certificate="w0.pem", private_key="w0.key", ca="group-ca.pem")
        options = rpc.TensorWireRpcBackendOptions(tls=tls)
    """

    certificate: str | os.PathLike[str]
    private_key: str | os.PathLike[str]
    ca: str | os.PathLike[str]
    rotate_every: float = 300.0

    def __post_init__(self) -> None:
        for name in ("certificate", "private_key", "ca"):
            if not isinstance(value := getattr(self, name), str | os.PathLike):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a path")
        seconds = self.rotate_every
        if isinstance(seconds, bool) or not isinstance(seconds, int | float):
            raise TypeError(f"rotate_every={seconds!r} is not a number of seconds")
        if not 0 < seconds < math.inf:
            raise ValueError(f"rotate_every={seconds} must be above 0, and finite")


def names_in(certificate: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the worker names that a certificate is for.

    Args:
        certificate: as ``ssl.SSLObject.getpeercert`` returns it.
    """
    alternatives = tuple(_alternatives(certificate.get("subjectAltName", ())))
    if alternatives:
        return alternatives
    subject = certificate.get("subject", ())
    return tuple(value for parts in subject for key, value in parts if key == "commonName")


def _alternatives(entries: tuple[tuple[str, str], ...]) -> Iterator[str]:
    for kind, value in entries:
        if kind == "DNS":
            yield value
        elif kind == "URI" and value.startswith(_URI):
            yield value.removeprefix(_URI)


def is_for(names: tuple[str, ...], worker: str) -> bool:
    """True if a certificate with these names is for the worker of that name."""
    return any(
        worker == name or (name.endswith(_ANY) and worker.startswith(name.removesuffix(_ANY)))
        for name in names
    )


def wrong_name(names: tuple[str, ...], worker: str) -> str:
    """Says that a certificate is another worker's."""
    holders = ", ".join(repr(name) for name in names) or "nobody"
    return f"its certificate is for {holders}, not for worker {worker!r}"


@dataclass(frozen=True, slots=True)
class _Contexts:
    connecting: ssl.SSLContext
    accepting: ssl.SSLContext


class Certificates:
    """The certificates that a worker shows and trusts; reads its files again now and then.

    Args:
        options: the files.
        worker: this worker's name.
        clock: seconds that pass.

    Raises:
        BringUpError: a file cannot be read, or the certificate is not for this worker.
    """

    def __init__(
        self, options: TlsOptions, worker: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._options = options
        self._worker = worker
        self._clock = clock
        self._lock = threading.Lock()
        self._contexts = self._load()
        self._read_at = clock()

    def connecting(self) -> ssl.SSLContext:
        """For the end that connects."""
        return self._current().connecting

    def accepting(self) -> ssl.SSLContext:
        """For the end that is connected to."""
        return self._current().accepting

    @staticmethod
    def require(shown: Mapping[str, Any], worker: str) -> None:
        """Refuses a certificate that the other end shows, unless it is for that worker.

        Args:
            shown: as ``ssl.SSLSocket.getpeercert`` returns it.
            worker: the name.

        Raises:
            BringUpError: it is for somebody else.
        """
        names = names_in(shown)
        if not is_for(names, worker):
            raise BringUpError(wrong_name(names, worker))

    def _current(self) -> _Contexts:
        with self._lock:
            now = self._clock()
            is_due = now - self._read_at >= self._options.rotate_every
            if is_due:
                self._read_at = now  # one thread reads, the others go on with what there is
        if is_due:
            try:
                self._contexts = self._load()
            except BringUpError as error:
                _log.warning("the former certificate stays in use: %s", error)
        return self._contexts

    def _load(self) -> _Contexts:
        contexts = _Contexts(
            self._context(ssl.PROTOCOL_TLS_CLIENT), self._context(ssl.PROTOCOL_TLS_SERVER)
        )
        self._check(contexts)
        return contexts

    def _context(self, protocol: int) -> ssl.SSLContext:
        options = self._options
        context = ssl.SSLContext(protocol)
        context.check_hostname = False  # the name that counts is the worker's
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        if protocol == ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0  # sessions are not resumed
        try:
            context.load_verify_locations(cafile=os.fspath(options.ca))
        except (OSError, ValueError) as error:
            raise BringUpError(f"ca={options.ca!s} cannot be used: {error}") from error
        _refuse_exposed(options.private_key)
        try:
            context.load_cert_chain(
                os.fspath(options.certificate), os.fspath(options.private_key), _no_password
            )
        except (OSError, ValueError) as error:
            raise BringUpError(
                f"certificate={options.certificate!s} with private_key={options.private_key!s} "
                f"cannot be used: {error}"
            ) from error
        return context

    def _check(self, contexts: _Contexts) -> None:
        """Shakes hands with itself: others would refuse what is wrong with the certificate."""
        certificate = self._options.certificate
        try:
            names = names_in(_certificate_shown(contexts))
        except ssl.SSLError as error:
            raise BringUpError(
                f"certificate={certificate!s} is not trusted by ca={self._options.ca!s}: {error}"
            ) from error
        if not is_for(names, self._worker):
            raise BringUpError(f"certificate={certificate!s}: {wrong_name(names, self._worker)}")


def _refuse_exposed(private_key: str | os.PathLike[str]) -> None:
    """Raises if others can read a private key.

    A group may read one that is root's, as secrets of Kubernetes are.
    """
    try:
        status = os.stat(private_key)
    except OSError as error:
        raise BringUpError(f"private_key={private_key!s} cannot be used: {error}") from error
    allowed = 0o750 if status.st_uid == 0 != os.geteuid() else 0o700
    if stat.S_IMODE(status.st_mode) & ~allowed & 0o777:
        raise BringUpError(
            f"private_key={private_key!s} has mode {stat.S_IMODE(status.st_mode):04o}, so that "
            "others may read or change it; chmod 600 it"
        )


def _no_password() -> str:
    """Keeps OpenSSL from asking for one on the terminal."""
    raise ValueError("the private key is encrypted; give one that is not")


def _certificate_shown(contexts: _Contexts) -> Mapping[str, Any]:
    forth, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        contexts.connecting.wrap_bio(back, forth, server_side=False),
        contexts.accepting.wrap_bio(forth, back, server_side=True),
    )
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[1].getpeercert() or {}
