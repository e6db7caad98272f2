"""Pickles of records that steps send, made without a look at each field by Python."""

from __future__ import annotations


class PickledByArguments:
    """Has a frozen dataclass pickled as a call of its class with all its fields, in order.

    Python pickles one that has slots field by field, by functions in Python at both ends.
    """

    __slots__ = ()
    __match_args__: tuple[str, ...]

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), tuple([getattr(self, name) for name in self.__match_args__])
