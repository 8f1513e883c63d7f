"""Which env each worker constructs: one word per worker, in memory that the workers share with the learner.

A worker writes its word before each construction, so that the learner knows the env if the worker then dies or hangs. A message
for each env would cost more than most envs take.
"""

from __future__ import annotations

import mmap
import os
from typing import Literal

from stepmill._native import OwnedFd

_WORD: Literal["q"] = "q"
_WORD_SIZE = 8
_NONE = 0
_FIRST = 2  # the word is this + env_id
IN_WORKER_INIT = -1  # in place of an env_id, while the worker calls `worker_init`


class BuildProgress:
    """The words of all workers of a pool. Each has one writer: its worker, or the learner while the worker does not run."""

    def __init__(self, fd: OwnedFd) -> None:
        """Map the memory that `make` has made in this process or in the learner."""
        self._fd = fd
        self._words = memoryview(mmap.mmap(fd.fileno(), 0)).cast(_WORD)

    @classmethod
    def make(cls, num_workers: int) -> BuildProgress:
        """Return new memory, in which no worker constructs an env."""
        fd = OwnedFd.memfd("stepmill-build")
        os.truncate(fd.fileno(), num_workers * _WORD_SIZE)
        return cls(fd)

    @property
    def fd(self) -> int:
        """The descriptor of the memory, for workers."""
        return self._fd.fileno()

    def begin(self, worker: int, env_id: int | None) -> None:
        """Write that a worker begins to construct an env, or to call `worker_init`; or that it does neither."""
        self._words[worker] = _NONE if env_id is None else env_id + _FIRST

    def read(self, worker: int) -> int | None:
        """Return the env that a worker constructs, or constructed last; IN_WORKER_INIT; None if there is none."""
        words = self._words
        word = words[worker] if words else _NONE
        return None if word == _NONE else word - _FIRST

    def close(self) -> None:
        """Give up the memory, which is unmapped as soon as no thread reads it. Idempotent."""
        self._words = memoryview(b"").cast(_WORD)
        self._fd.close()
