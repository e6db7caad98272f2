"""The kinds of arrays that kernels take."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from tensorwire.parameter_server.opaque import Untyped

Ints: TypeAlias = NDArray[np.int64]
"""Ids, or numbers of rows."""
Pairs: TypeAlias = NDArray[np.int64]
"""An index: pairs of an id and its row, -1 where there is none."""
Floats: TypeAlias = NDArray[np.float32]
"""Rows of numbers."""
Halves: TypeAlias = NDArray[np.uint16]
"""Rows of numbers of 16 bits, as their bits."""
Bools: TypeAlias = NDArray[np.bool_]
"""True or False for each id, row or slot."""
Array: TypeAlias = NDArray[Untyped]
"""Any of these types; the column that it belongs to names the one."""
Bytes: TypeAlias = NDArray[np.uint8]
"""Marks."""
