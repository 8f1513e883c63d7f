"""Shows which env each lane constructs, in one word per lane that the workers share with the learner.

A worker writes the word before each construction, so that the learner knows the env if the worker then dies or hangs. A
message for each env would take more time than the construction of most envs.
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

from stepmill._native import OwnedFd

_WORD: Literal["q"] = "q"
_WORD_SIZE = 8
_NONE = 0
_FIRST = 3  # a word for an env is this number + env_id
IN_WORKER_INIT = -1  # in place of an env_id, while the worker calls `worker_init`
BUILT = -2  # the lane has built its envs, and other lanes of its worker have not


class BuildProgress:
    """The words of all lanes of a pool. The worker writes its words, or the learner while the worker does not run."""

    def __init__(self, fd: OwnedFd) -> None:
        """Map the memory that `make` has made in this process or in the learner."""
        self._fd = fd
        self._words = memoryview(mmap.mmap(fd.fileno(), 0)).cast(_WORD)

    @classmethod
    def make(cls, num_lanes: int) -> BuildProgress:
        """Return new memory, in which no lane constructs an env."""
        fd = OwnedFd.memfd("stepmill-build")
        os.truncate(fd.fileno(), num_lanes * _WORD_SIZE)
        return cls(fd)

    @property
    def fd(self) -> int:
        """The descriptor of the memory, for workers."""
        return self._fd.fileno()

    def begin(self, lane: int, env_id: int | None) -> None:
        """Write what a lane does now.

        `env_id` is the env that it constructs, or IN_WORKER_INIT, or BUILT, or None for none of these.
        """
        self._words[lane] = _NONE if env_id is None else env_id + _FIRST

    def read(self, lane: int) -> int | None:
        """Return the env that a lane is constructing or constructed last, or IN_WORKER_INIT, or BUILT, or None."""
        words = self._words
        word = words[lane] if words else _NONE
        return None if word == _NONE else word - _FIRST

    def close(self) -> None:
        """Release the memory, which is unmapped as soon as no thread reads it. Later calls do nothing."""
        self._words = memoryview(b"").cast(_WORD)
        self._fd.close()
