"""Python runs this when a process starts whose parent redirected torch's names.

Waits until the process imports torch, and then installs the redirection. Imports nothing of
ours before, as most processes never import torch. Runs the ``sitecustomize`` that it hides.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Sequence


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as others do, and has the redirection installed when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Finds nothing but torch."""
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads torch by its own loader, and then installs the redirection."""

    def __init__(self, genuine: importlib.abc.Loader) -> None:
        self._genuine = genuine

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """Creates what torch's own loader creates."""
        return self._genuine.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        """Loads torch; says on standard error if the redirection cannot be installed."""
        module.__loader__ = self._genuine
        if module.__spec__ is not None:
            module.__spec__.loader = self._genuine
        self._genuine.exec_module(module)
        root = os.environ.get("TENSORWIRE_DROPIN", "")
        if root not in sys.path:
            sys.path.append(root)
        try:
            from tensorwire.dropin import install

            install(os.environ.get("TENSORWIRE_DROPIN_BACKEND"))
        except Exception as error:
            print(f"tensorwire.dropin: torch's own RPC is used here: {error}", file=sys.stderr)


def _run_the_hidden_one() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    path = [folder for folder in sys.path if os.path.abspath(folder or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


if os.environ.get("TENSORWIRE_DROPIN"):
    sys.meta_path.insert(0, _AfterTorch())
_run_the_hidden_one()
