"""The input that the command lines of all tutorials accept, and what they say of the rest.

All of it is looked at before anything is started, so that a mistake costs no time. Each
function raises ``ArgumentTypeError``, whose text argparse shows, if it is used as a ``type``.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentTypeError
from collections.abc import Mapping
from pathlib import Path

MOST_PROCESSES = 256
"""On one machine: a slip of the finger must not start thousands."""

PICTURES = (".png", ".pdf", ".svg", ".jpg", ".jpeg", ".webp", ".tif", ".tiff", ".eps", ".ps")
"""By how its name ends, what matplotlib draws. It is loaded by those who draw, at the end."""

_BACKENDS = ("TENSORPIPE", "TENSORWIRE")
_SET_BY_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def positive(text: str) -> int:
    """Return the number that ``text`` says if it is at least 1."""
    return _whole_number(text, 1)


def rank(text: str) -> int:
    """Return the number that ``text`` says if it is at least 0."""
    return _whole_number(text, 0)


def port(text: str) -> int:
    """Return the number that ``text`` says if there can be such a TCP port."""
    number = _whole_number(text, 1)
    if number > 65535:
        raise ArgumentTypeError(f"must be at most 65535, not {number}")
    return number


def _whole_number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ArgumentTypeError(f"must be a whole number of at least {least}, not {text!r}")
    return number


def backend(text: str) -> str:
    """Return ``text`` if it is the name of a backend."""
    if text not in _BACKENDS:
        import rpc  # loads torch, so only to look whether there are more by now

        known = rpc.BackendType.__members__
        if text not in known:
            raise ArgumentTypeError(f"there is no backend {text!r}; there are {', '.join(known)}")
    return text


def launched(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the rank and the number of processes that torchrun names; None without it."""
    if "RANK" not in environment:
        return None
    missing = [name for name in _SET_BY_TORCHRUN if name not in environment]
    if missing:
        raise ArgumentTypeError(
            f"RANK is set in the environment, but not {', '.join(missing)}; torchrun sets "
            f"{', '.join(_SET_BY_TORCHRUN)}. Set all of them, or none"
        )
    return _variable(environment, "RANK", 0), _variable(environment, "WORLD_SIZE", 1)


def _variable(environment: Mapping[str, str], name: str, least: int) -> int:
    try:
        return _whole_number(environment[name], least)
    except ArgumentTypeError as error:
        raise ArgumentTypeError(f"environment variable {name}: {error}") from None


def require_rank(number: int, processes: int) -> None:
    """Raise unless one of so many processes can have this rank."""
    if number >= processes:
        raise ArgumentTypeError(
            f"rank {number} must be from 0 to {processes - 1}, as there are {processes} processes"
        )


def require_picture(path: Path) -> None:
    """Raise unless a picture can be written to ``path``; makes the folder that it is in."""
    try:
        if path.is_dir():
            raise ArgumentTypeError(f"argument --output: {path} is a folder; name a file in it")
        if path.suffix.lower() not in PICTURES:
            raise ArgumentTypeError(
                f"argument --output: cannot draw {path}, whose name must end in one of "
                f"{' '.join(PICTURES)}"
            )
        _make(path.parent)
        is_new = not path.exists()
        with path.open("ab"):
            pass
        if is_new:
            path.unlink()
    except OSError as error:
        raise _cannot_write(path, error) from None


def require_folder(path: Path) -> None:
    """Raise unless files can be written in the folder ``path``; makes it."""
    try:
        _make(path)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise _cannot_write(path, error) from None


def _make(folder: Path) -> None:
    if not folder.exists():  # what exists and is no folder is named as such by what comes next
        folder.mkdir(parents=True, exist_ok=True)


def _cannot_write(path: Path, error: OSError) -> ArgumentTypeError:
    return ArgumentTypeError(f"argument --output: cannot write {path}: {error.strerror}")
