"""Values whose types cannot be told where they pass; each name says what they are, and why.

Whatever else the parameter server hands about has a type of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch

AnyTable: TypeAlias = Any
"""A table of a cluster, or one that is followed; modules that hold it may not import its class."""

Carried: TypeAlias = Any
"""Gradients, rows or values on a record; modules that decide may not import their classes."""

Function: TypeAlias = Callable[..., Any]
"""A function whose arguments are handed on as they came."""

Json: TypeAlias = Any
"""A value that came out of JSON, or goes into it; whoever decodes it knows its shape."""

Response: TypeAlias = Any
"""The answer to a message; each message says which classes answer it."""

Resumed: TypeAlias = Any
"""The value that a task goes on with: each ``Wait`` has one of its own, a generator only one."""

Numba: TypeAlias = Any
"""A value whose type numba infers, or a part of its compiler, which has no types of its own."""

OptimizerMaker: TypeAlias = Callable[..., torch.optim.Optimizer]
"""A class of optimizers, or a function that makes one; arguments are those of that class."""

OptimizerValue: TypeAlias = Any
"""A hyper-parameter, or a part of the state, of whatever optimizer a program uses."""

Unpickled: TypeAlias = Any
"""An object that a program pickled; it knows the class."""

UserValue: TypeAlias = Any
"""Something of a program's own that is handed back as it came, such as a batch of its loader."""

Untyped: TypeAlias = Any
"""An object of a library without types, or with types that leave out what is used of it."""
