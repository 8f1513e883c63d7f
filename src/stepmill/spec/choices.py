"""The enums of the options, and the states of an env.

Workers import them without `PoolOptions`, which takes long to make.
"""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import Literal, TypeAlias


class AutoresetMode(str, Enum):
    """When an env is reset after the end of an episode. Names and values are Gymnasium's."""

    NEXT_STEP = "NextStep"  #: The step after the end of an episode resets the env.
    SAME_STEP = "SameStep"  #: The step that ends an episode also resets the env.
    DISABLED = "Disabled"  #: You reset the env.


class Seeding(str, Enum):
    """Where the seeds of automatic resets come from."""

    CONTINUE = "continue"  #: Without a seed, so that the env's own random generator continues.
    PER_EPISODE = "per_episode"  #: A seed that is derived from (seed, env_id, episode).
    FIXED = "fixed"  #: The same seed in each episode.


class OnFault(str, Enum):
    """What happens to an env that raised, hung, crashed or returned a bad value."""

    RAISE = "raise"  #: The fault is raised.
    TRUNCATE = "truncate"  #: The episode ends as truncated, and info["fault"] has the cause.
    REPLAY = "replay"  #: The episode is repeated up to the step that failed, which is tried again.


OnFaultName: TypeAlias = Literal["raise", "truncate", "replay"]


class Context(str, Enum):
    """How worker processes are started."""

    FORKSERVER = "forkserver"  #: A small process, started once per program, forks the workers.
    FORK = "fork"  #: Workers are forks of the caller, and inherit its memory.
    SPAWN = "spawn"  #: Each worker is a new interpreter.


class RetryIn(str, Enum):
    """Where a failed reset is tried again."""

    SAME = "same"  #: In the same process.
    NEW = "new"  #: In a new process.


class BackendName(str, Enum):
    """Where envs run."""

    AUTO = "auto"  #: SERIAL for one env, num_workers=0 or a few tiny envs, and PROCESS otherwise.
    SERIAL = "serial"  #: In the calling thread.
    THREAD = "thread"  #: In threads of the calling process.
    PROCESS = "process"  #: In worker processes.
    ENVPOOL = "envpool"  #: In EnvPool's threads.
    KERNEL = "kernel"  #: Compiled, in threads of the calling process.
    RAY = "ray"  #: In workers on the machines of a Ray cluster.


class EnvState(IntEnum):
    """The state of an env for the user of a pool. Native code uses the same numbers."""

    IDLE = 0  #: It waits for a command.
    BUSY = 1  #: It is stepping or resetting.
    READY = 2  #: Its result can be received.
    FAULTED = 3  #: Its fault was raised. It is usable again after a reset or revive().
    EXHAUSTED = 4  #: It takes no more steps until a reset, because it has finished num_episodes episodes.
    NEEDS_RESET = 5  #: It was never reset, or was restarted since.
