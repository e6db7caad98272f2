"""Objects of ``torch.distributed.rpc`` that come here because an import was left as it was.

Decides which objects those are, and says what to import instead. Needs none of torch's
packages: it looks at the names of classes.
"""

from __future__ import annotations

from typing import Final

_MOVED: Final = (
    ("torch._C._distributed_rpc", "torch.distributed.rpc", "rpc"),
    ("torch.distributed.rpc", "torch.distributed.rpc", "rpc"),
    ("torch.distributed.nn.api", "torch.distributed.nn", "remote_module"),
)
"""The places where torch defines its class, programs import it from, and they find ours."""

_PUBLIC: Final = {"PyRRef": "RRef", "_RemoteModule": "RemoteModule"}
_BOUND_TO_TORCHS_AGENT: Final = ("RRef", "RemoteModule")


def import_remedy(value: object) -> str:
    """Says what to import instead of ``value``, as the end of an error; empty unless torch's."""
    kind = _find(type(value))
    if kind is None:
        return ""
    name, theirs, ours = kind
    return f"; this is {theirs}'s {name}, so import {name} from {ours} instead"


def is_torchs(value: object, name: str) -> bool:
    """True if ``value`` is of torch's class ``name``, or of one derived from it."""
    kind = _find(type(value))
    return kind is not None and kind[0] == name


def works_in_torchs_calls_only(kind: type) -> bool:
    """True if objects of a class mean nothing to the workers of a group of ours."""
    entry = _find(kind)
    return entry is not None and entry[0] in _BOUND_TO_TORCHS_AGENT


def _find(kind: type) -> tuple[str, str, str] | None:
    """The name of torch's class that ``kind`` is or derives from, and both packages."""
    for base in kind.__mro__:
        for module, theirs, ours in _MOVED:
            if f"{base.__module__}.".startswith(f"{module}."):
                return _PUBLIC.get(base.__name__, base.__name__), theirs, ours
    return None
