"""Certificates are read, checked, bound to a worker's name, and read again."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from rpc.errors import BringUpError
from rpc.transports.tensorwire.tls import Certificates, TlsOptions, is_for, names_in, wrong_name
from tests.rpc.transports.tensorwire.certificates import write

_NAMED = {"subject": ((("organizationName", "us"),), (("commonName", "ps:0"),))}


@pytest.mark.parametrize(
    ("alternatives", "names"),
    [
        ((), ("ps:0",)),
        ((("IP Address", "127.0.0.1"), ("URI", "https://elsewhere")), ("ps:0",)),
        ((("DNS", "w0"), ("URI", "tensorwire:ps:1")), ("w0", "ps:1")),
    ],
    ids=["common-name", "others-do-not-count", "alternatives"],
)
def test_a_certificate_says_which_workers_it_is_for(
    alternatives: tuple[tuple[str, str], ...], names: tuple[str, ...]
) -> None:
    assert names_in({**_NAMED, "subjectAltName": alternatives}) == names


@pytest.mark.parametrize(
    ("names", "worker", "expected"),
    [
        (("w0",), "w0", True),
        (("w0",), "w01", False),
        (("w0*",), "w01", True),
        (("a", "trainer:*"), "trainer:7", True),
        (("trainer:*",), "ps:0", False),
        ((), "w0", False),
    ],
)
def test_a_name_is_one_workers_or_a_prefix(
    names: tuple[str, ...], worker: str, expected: bool
) -> None:
    assert is_for(names, worker) is expected
    assert repr(worker) in wrong_name(names, worker)


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"certificate": 3}, TypeError, "certificate=3 is a int, not a path"),
        ({"rotate_every": "daily"}, TypeError, "rotate_every='daily' is not a number of seconds"),
        ({"rotate_every": 0}, ValueError, "rotate_every=0 must be above 0"),
    ],
)
def test_wrong_options_are_named(
    changes: dict[str, object], error: type[Exception], told: str
) -> None:
    values = {"certificate": "a", "private_key": "b", "ca": "c", **changes}
    with pytest.raises(error, match=told):
        TlsOptions(**values)  # type: ignore[arg-type]


def test_a_worker_with_its_certificate_is_ready(tmp_path: Path) -> None:
    Certificates(write(tmp_path, "w0"), "w0").connecting()


def test_another_workers_certificate_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(BringUpError, match="its certificate is for 'w0', not for worker 'w1'"):
        Certificates(write(tmp_path, "w0"), "w1")


def test_a_certificate_that_nobody_will_trust_is_refused_at_the_start(tmp_path: Path) -> None:
    options = write(tmp_path, "w0", by=trustme.CA())
    with pytest.raises(BringUpError, match=r"worker\.pem is not trusted by ca=.*worker\.ca"):
        Certificates(options, "w0")


@pytest.mark.parametrize("file", ["certificate", "private_key", "ca"])
def test_a_file_that_is_not_there_is_named(file: str, tmp_path: Path) -> None:
    options = write(tmp_path, "w0")
    missing = tmp_path / "missing.pem"
    with pytest.raises(BringUpError, match=rf"{file}={missing}.* cannot be used: .*No such file"):
        Certificates(replace(options, **{file: missing}), "w0")


def test_files_are_read_again_when_it_is_time(tmp_path: Path) -> None:
    now = 0.0
    options = replace(write(tmp_path, "w0"), rotate_every=60)
    certificates = Certificates(options, "w0", lambda: now)
    first = certificates.accepting()
    write(tmp_path, "w0")
    now = 59.0
    assert certificates.accepting() is first
    now = 60.0
    assert certificates.accepting() is not first
    assert certificates.accepting() is certificates.accepting()


def test_a_certificate_that_cannot_be_read_any_more_stays_in_use(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    options = replace(write(tmp_path, "w0"), rotate_every=60)
    certificates = Certificates(options, "w0", lambda: now)
    first = certificates.connecting()
    (tmp_path / "worker.pem").write_text("nothing of the kind")
    now = 60.0
    with caplog.at_level(logging.WARNING):
        assert certificates.connecting() is first
    assert "the former certificate stays in use: certificate=" in caplog.text
    write(tmp_path, "w0")
    now = 120.0
    assert certificates.connecting() is not first


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660])
def test_a_private_key_that_others_can_read_is_refused(mode: int, tmp_path: Path) -> None:
    options = write(tmp_path, "w0")
    Path(options.private_key).chmod(mode)
    with pytest.raises(BringUpError, match=rf"worker\.key has mode {mode:04o}.*chmod 600 it"):
        Certificates(options, "w0")
