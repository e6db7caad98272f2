"""The names of things that outlive a message: workers' lives, references, forks.

Only values; who may create, keep or delete them is decided in ``references``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

# Tuples, because they are the keys of many tables, and tuples are hashed in C.

new_tuple: Final = tuple.__new__
"""Makes a named tuple. Its constructor, a function of Python's, does just that.

A call makes a dozen on its way, and one in an autograd context more.
"""


class Life(NamedTuple):
    """One incarnation of one worker: a worker that returns has a new life.

    Args:
        worker: the worker's id.
        incarnation: at least 0; higher is later.
    """

    worker: int
    incarnation: int

    def __str__(self) -> str:
        return f"worker {self.worker} (incarnation {self.incarnation})"


class GlobalId(NamedTuple):
    """Names an RRef or a fork of one, uniquely among all lives of all workers.

    Args:
        creator: id of the worker that allocated it.
        incarnation: which life of that worker.
        counter: from 0 in each life; RRefs and forks share the count.
    """

    creator: int
    incarnation: int
    counter: int

    @property
    def life(self) -> Life:
        """The life that allocated this id."""
        return Life(self.creator, self.incarnation)

    def __repr__(self) -> str:
        return f"GloballyUniqueId(created_on={self.creator}, local_id={self.counter})"


class Reference(NamedTuple):
    """The identity of the value that an RRef stands for, the same on every worker that holds it.

    Args:
        rref: the RRef's id; its creator is the worker that called ``remote()`` or ``RRef()``.
        owner: where the value lives; a later life of that worker does not have it.
        creation: number of the ``remote()`` call, counted per creator and owner. It lets the
            owner tell a creation that is still on its way from one that came and was freed.
    """

    rref: GlobalId
    owner: Life
    creation: int
