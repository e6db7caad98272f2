"""The steps of a simulated run: everything that can happen, as data.

A run is a list of steps, each with a number. What a step makes (a packet, a
handle, a call) is named after the step, so that a name means the same thing
when other steps are left out of the run. A step whose subject does not exist
is skipped. Nothing is decided here.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from rpc.ids import Life

Name: TypeAlias = tuple[int, int]
"""Number of a step, and which of the things that it made."""


class RunPhase(enum.IntEnum):
    """The phases of a run."""

    WORK = 0
    """Programs run and faults happen."""
    SETTLE = 1
    """No new work, no new faults; what is under way comes to its end."""
    DROP = 2
    """Programs let go of all their references."""
    LEAVE = 3
    """Everybody shuts down."""


# --- What programs do -------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Create:
    """``remote()``; ``leaves`` says whether the request can be sent."""

    by: Life
    to: int
    timeout: float
    leaves: bool
    job: Name | None


@dataclass(frozen=True, slots=True)
class Keep:
    """``RRef(value)``."""

    by: Life


class Addressing(enum.IntEnum):
    """Ways in which a program names the worker that it calls."""

    INFO = 0
    NAME = 1
    ID = 2


@dataclass(frozen=True, slots=True)
class CallWorker:
    """A call whose arguments contain the handles ``lends``; those in ``drops`` go after it.

    ``job`` is the handler that makes the call, if one does; it waits for the
    outcome if ``waits``. ``patient`` makes the callee wait until the owners
    confirmed the references, as agents do.
    """

    by: Life
    to: int
    address: Addressing
    lends: tuple[Name, ...]
    drops: tuple[Name, ...]
    timeout: float
    leaves: bool
    job: Name | None
    waits: bool
    patient: bool


@dataclass(frozen=True, slots=True)
class Try:
    """An attempt at a call that runs once however often it is tried: a first one, or another.

    ``number`` is the number of a call that is still open, or None for a new one.
    """

    by: Life
    to: int
    timeout: float
    number: int | None


@dataclass(frozen=True, slots=True)
class CancelCall:
    """A program gives up a call."""

    by: Life
    call: Name


@dataclass(frozen=True, slots=True)
class Fetch:
    """``to_here()``."""

    by: Life
    handle: Name
    timeout: float


@dataclass(frozen=True, slots=True)
class Drop:
    """The last use of a handle."""

    by: Life
    handle: Name


@dataclass(frozen=True, slots=True)
class Serve:
    """A handler returns ``returns``; it stored what is in ``keeps`` of its arguments."""

    by: Life
    job: Name
    keeps: tuple[Name, ...]
    returns: tuple[Name, ...]
    drops: tuple[Name, ...]
    raises: bool


@dataclass(frozen=True, slots=True)
class Begin:
    """``shutdown()``."""

    by: Life


@dataclass(frozen=True, slots=True)
class Release:
    """Every user handle is let go of at once, whoever has it."""

    by: Life


# --- What the network and the machines do -----------------------------------


@dataclass(frozen=True, slots=True)
class Deliver:
    """A packet arrives."""

    packet: Name


@dataclass(frozen=True, slots=True)
class Duplicate:
    """A packet will arrive once more."""

    packet: Name


@dataclass(frozen=True, slots=True)
class Stray:
    """A reply arrives from a worker that was not asked."""

    packet: Name
    sender: Life


@dataclass(frozen=True, slots=True)
class Fail:
    """A request turns out not to have left; its caller hears of it."""

    by: Life
    call: Name


@dataclass(frozen=True, slots=True)
class Lose:
    """A packet is lost, and with it the link that it was on."""

    packet: Name


@dataclass(frozen=True, slots=True)
class Cut:
    """The link between two living workers breaks for good; both hear of it, some time."""

    one: Life
    other: Life


@dataclass(frozen=True, slots=True)
class Partition:
    """Nothing passes between ``island`` and the rest."""

    island: frozenset[int]


@dataclass(frozen=True, slots=True)
class Heal:
    """A partition ends: all messages pass again."""


@dataclass(frozen=True, slots=True)
class Hear:
    """News of another worker reach one."""

    news: Name


@dataclass(frozen=True, slots=True)
class Crash:
    """A process dies."""

    who: Life


@dataclass(frozen=True, slots=True)
class Stop:
    """A process is stopped, and wakes as it was.

    At once, or when it has sent ``sends`` more messages and is about to send another; its clock
    goes on meanwhile, or stands, as that of a machine that is paused.
    """

    who: Life
    sends: int | None
    clock_stands: bool


@dataclass(frozen=True, slots=True)
class Declare:
    """The others take one that is stopped for lost; all will hear that, it too, some time each."""

    who: Life


@dataclass(frozen=True, slots=True)
class Wake:
    """A stopped process goes on."""

    who: Life


@dataclass(frozen=True, slots=True)
class Pulse:
    """The timers run of one that woke."""

    who: Life


@dataclass(frozen=True, slots=True)
class Depart:
    """A worker that knows that it was declared lost, and whose program let go of all, ends."""

    who: Life


@dataclass(frozen=True, slots=True)
class Start:
    """A new worker joins, or one that died returns in a new life."""

    worker: int


@dataclass(frozen=True, slots=True)
class Close:
    """A worker that finished its shutdown ends."""

    who: Life


@dataclass(frozen=True, slots=True)
class Pass:
    """Time passes."""

    seconds: float


Act: TypeAlias = (
    Create
    | Keep
    | CallWorker
    | Try
    | CancelCall
    | Fetch
    | Drop
    | Serve
    | Begin
    | Release
    | Deliver
    | Duplicate
    | Stray
    | Fail
    | Lose
    | Cut
    | Partition
    | Heal
    | Hear
    | Crash
    | Stop
    | Declare
    | Wake
    | Pulse
    | Depart
    | Start
    | Close
    | Pass
)


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of a script.

    Args:
        number: names what the step makes.
        phase: of the run.
        act: what happens.
    """

    number: int
    phase: RunPhase
    act: Act


def short(value: object) -> str:
    """A life, a name or anything made of them, in few characters."""
    if isinstance(value, Life):
        return f"w{value.worker}.{value.incarnation}"
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(n, int) for n in value):
        return f"#{value[0]}.{value[1]}"
    if isinstance(value, tuple | frozenset):
        return "[" + " ".join(short(each) for each in value) + "]"
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, float):
        return f"{value:g}"
    return str(value)


def describe(act: Act) -> str:
    """One line of a transcript."""
    fields = [(name, getattr(act, name)) for name in act.__slots__]
    words = [f"{name}={short(value)}" for name, value in fields if value not in (None, ())]
    return f"{type(act).__name__} {' '.join(words)}".rstrip()
