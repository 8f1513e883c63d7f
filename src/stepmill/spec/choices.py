"""The enums of the options, and the states of an env. Workers import them without `PoolOptions`, whose class takes long to make."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Literal, TypeAlias


class AutoresetMode(str, Enum):
    """When an env is reset after the end of an episode. Names and values are Gymnasium's."""

    NEXT_STEP = "NextStep"
    SAME_STEP = "SameStep"
    DISABLED = "Disabled"


class Seeding(str, Enum):
    """Where the seeds of automatic resets come from."""

    CONTINUE = "continue"  # no seed: the env's own random generator continues
    PER_EPISODE = "per_episode"  # a seed derived from (seed, env_id, episode)
    FIXED = "fixed"  # the same seed each episode


class OnFault(str, Enum):
    """What happens to an env that raised, hung, crashed or returned a bad value."""

    RAISE = "raise"
    TRUNCATE = "truncate"
    REPLAY = "replay"


OnFaultName: TypeAlias = Literal["raise", "truncate", "replay"]


class Context(str, Enum):
    """How worker processes are started."""

    FORKSERVER = "forkserver"
    FORK = "fork"
    SPAWN = "spawn"


class RetryIn(str, Enum):
    """Where a failed reset is tried again."""

    SAME = "same"
    NEW = "new"  # in a new process


class BackendName(str, Enum):
    """Where envs run."""

    AUTO = "auto"
    SERIAL = "serial"
    THREAD = "thread"
    PROCESS = "process"
    ENVPOOL = "envpool"
    KERNEL = "kernel"
    RAY = "ray"


class EnvState(IntEnum):
    """The state of an env for the user of a pool. Native code uses the same numbers."""

    IDLE = 0  # waits for a command
    BUSY = 1  # steps or resets
    READY = 2  # its result can be received
    FAULTED = 3  # its fault was raised; it is usable again after a reset or revive()
    EXHAUSTED = 4  # it takes no more steps until a reset, because it has finished num_episodes episodes
    NEEDS_RESET = 5  # it was never reset, or was restarted since
