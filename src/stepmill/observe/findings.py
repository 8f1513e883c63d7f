"""What `stepmill doctor` and `stepmill.testing.check_env` can find in an env, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias


class Severity(Enum):
    """How bad a finding is. Notes do not change the exit status: they concern a backend or a start method that is not the default."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One problem of an env.

    Attributes:
        check: the name of the check, for programs.
        what: a description of the problem.
        where: the call, the step or the backend with the problem.
        cure: what to do.
    """

    check: str
    severity: Severity
    what: str
    where: str
    cure: str


Emit: TypeAlias = Callable[[str, str, str], None]  # a key of CURES, what, where

# By the name of a check: the severity, and the cure. What follows a slash is not part of the name.
CURES = {
    "not-checked": ("error", "play it with a Pool"),
    "bad-output": ("error", "correct the env, or its spaces"),
    "bad-reward": ("error", "return a finite number"),
    "observation-space": ("error", "correct the space or the env"),
    "observation-space/rounding": ("warning", "clip the observation, or widen the space by as much"),
    "observation-space/dtype": ("warning", "return the dtype of the space"),
    "observation-aliases": ("warning", "return a copy; pools copy results, but other users of the env see old observations change"),
    "changes-action": ("warning", "copy the action in step() before you change it; in a program it is the learner's array"),
    "huge-info": ("warning", "put large arrays into the observation; infos are copied and decoded one by one"),
    "unpicklable-info": ("error", "put plain data into info"),
    "slow-reset": ("warning", "use resets.spare_envs, which are reset in advance, or resets.overlap"),
    "threads": ("warning", "workers already use all cores: limit the env's threads (workers.env, workers.threads)"),
    "holds-gil": ("note", "use backend='process', or release the GIL in native code; backend='thread' gains nothing"),
    "memory-leak": ("warning", "look for lists that grow, in the env and in its wrappers (tracemalloc)"),
    "descriptor-leak": ("error", "close files and sockets"),
    "children-left": ("error", "end them in close(), and wait for them"),
    "global-generator": ("error", "use self.np_random, which reset(seed=...) seeds; then check again"),
    "non-deterministic": ("error", "draw all random numbers from self.np_random; do not use the clock, the order of sets, or a space that was not seeded"),
    "state-survives-reset": ("error", "set all state in reset()"),
    "shared-state": ("error", "keep state in self, not in the class or module; until then, use envs_per_worker=1"),
    "few-steps": ("note", "compare more with stepmill.testing.check_env"),
    "backend-differs": ("error", "look for state or generators that envs of one process share"),
    "fork-unsafe": ("note", "keep the default context='forkserver', or use 'spawn'; make no env in the program that makes the pool"),
    "raises": ("error", "correct the env; a pool reports it as EnvError"),
    "unpicklable-factory": ("error", "make what it holds (locks, files, connections) inside the function, or use the serial or thread backend"),
    "hangs": ("error", "find where with `py-spy dump`; in a pool, set step_timeout_s and reset_timeout_s"),
    "crashes": ("error", "run it under a native debugger; in a pool, use backend='process' and crash_dir"),
}  # fmt: skip


def make_finding(check: str, what: str, where: str) -> Finding:
    """Return the finding of a check, which is a key of CURES."""
    severity, cure = CURES[check]
    return Finding(check.partition("/")[0], Severity(severity), what, where, cure)
