"""The input that the command lines of all tutorials accept, and what they say of the rest.

All of it is looked at before the work begins, so that a mistake costs no time. Each
function raises ``ArgumentTypeError``, whose text argparse shows, if it is used as a ``type``.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentTypeError
from pathlib import Path

_BACKENDS = ("TENSORPIPE", "TENSORWIRE")


def positive(text: str) -> int:
    """Return the number that ``text`` says if it is at least 1."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return number


def backend(text: str) -> str:
    """Return ``text`` if it is the name of a backend."""
    if text not in _BACKENDS:
        import rpc  # loads torch, so only to look whether there are more by now

        known = rpc.BackendType.__members__
        if text not in known:
            raise ArgumentTypeError(f"there is no backend {text!r}; there are {', '.join(known)}")
    return text


def require_folder(path: Path) -> None:
    """Raise unless files can be written in the folder ``path``; makes it."""
    try:
        if not path.exists():  # what exists and is no folder is named as such by what comes next
            path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        said = f"argument --output: cannot write {path}: {error.strerror}"
        raise ArgumentTypeError(said) from None
