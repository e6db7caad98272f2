"""The base of the handles that travel beside a pickle: references to values of other workers."""

from __future__ import annotations


class OutOfBandHandle:
    """Base of handles that travel out of band, as an index into ``Encoded.references``."""

    __slots__ = ()
