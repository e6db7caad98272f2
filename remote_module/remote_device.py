"""Reads ``"worker/device"``, the place where a remote module lives.

Decides the syntax only. Whether there is such a worker is the group's business,
whether there is such a device shows where the module is made.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_CPU = "cpu"


@dataclass(frozen=True, slots=True)
class RemoteDevice:
    """A device of a worker.

    Args:
        worker: the worker's name, or its rank.
        device: as that worker calls it.
    """

    worker: str | int
    device: torch.device


def parse_remote_device(text: str) -> RemoteDevice:
    """Reads ``name/device``, ``name``, ``rank:N/device`` or ``rank:N``; without a device, the CPU.

    Raises:
        TypeError: not a string.
        ValueError: the text is of no such form.
        RuntimeError: torch knows no such device.
    """
    if not isinstance(text, str):
        raise TypeError(f"remote_device must be a string, but got {type(text).__name__}: {text!r}")
    worker, slash, device = text.partition("/")
    if not worker or "/" in device or (not slash and _is_device(worker)):
        raise _parse_error(text)
    return RemoteDevice(_parse_worker(worker, text), torch.device(device if slash else _CPU))


def _parse_worker(worker: str, text: str) -> str | int:
    prefix, colon, number = worker.partition(":")
    if not colon or prefix != "rank":  # such as "stage:1", which rpcrun names a worker
        return worker
    if number.isdecimal() and number.isascii():
        return int(number)
    raise _parse_error(text)


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True


def _parse_error(text: str) -> ValueError:
    return ValueError(
        f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' "
        "or 'rank:<rank>/<device>'; '/<device>' may be left out and means the CPU"
    )
