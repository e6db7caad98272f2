"""Breaks the library on purpose, for the tests that show that the suite would notice."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

import rpc
import rpc.api
from torch_suite.setup import Sabotage


def commit(what: Sabotage, genuine: Mapping[str, types.ModuleType]) -> None:
    """Breaks this process's copy of the library."""
    if what is Sabotage.WRONG_RESULTS:
        _replace(lambda *args, **kwargs: None)
    elif what is Sabotage.GENUINE_CALLS:
        _replace(genuine["torch.distributed.rpc.api"].rpc_sync)


def _replace(rpc_sync: Any) -> None:
    rpc.rpc_sync = rpc.api.rpc_sync = rpc_sync
