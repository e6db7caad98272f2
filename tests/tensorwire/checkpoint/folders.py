"""Changes what is in the folder of a checkpoint, as an accident or a stranger might."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tensorwire.checkpoint.manifest import sealed


def rewrite(folder: Path, change: Callable[[Any], object]) -> None:
    """Changes the manifest, and gives it the checksum of what it says then."""
    path = folder / "manifest.json"
    document = json.loads(path.read_text())
    del document["checksum"]
    change(document)
    path.write_text(sealed(json.dumps(document, indent=1)))


def flip(path: Path, at: int) -> None:
    """Flips a bit."""
    content = bytearray(path.read_bytes())
    content[at] ^= 0x40
    path.write_bytes(content)
