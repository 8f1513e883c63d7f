"""The interface of adapters, and the measured loop that all adapters share.

An adapter's module has a class `Engine(Adapter)`. The driver builds it once per cell and then requests rounds. `advance` runs one batch: it
sends actions, receives the results, and reads a few elements of them. It must do nothing else, because it is what is measured.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.envs import EnvFn, action_ring, env_fns

CHUNK_S = 2e-3  # the clock is read, and episode ends are sampled, once per chunk
WARM_BATCHES = 3


@dataclass(frozen=True)
class Job:
    """The envs that an engine runs, their number, and the options of the engine."""

    env: str
    num_envs: int
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def env_fns(self) -> list[EnvFn]:
        num_spares = self.options.get("pool", {}).get("resets", {}).get("spare_envs", 0)
        return env_fns(self.env, self.num_envs + num_spares)

    @property
    def is_timed(self) -> bool:
        """Whether the observation contains the env time used so far."""
        return self.env in ("sleep1ms", "cpu200us", "slowreset", "slowreset500")


@dataclass(frozen=True)
class Round:
    """The result of one round: env steps (without calls that only reset), seconds, and env seconds if the envs report them."""

    steps: float
    wall_s: float
    env_s: float | None = None


class Adapter(ABC):
    """One engine with its envs, from `start` to `close`."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.num_envs = job.num_envs
        self.actions = action_ring(job.env, job.num_envs)
        self.turn = 0
        # For engines whose step after the end of an episode only resets: the flags of the newest batch.
        self.ended: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None
        self._used_s: dict[float, float] = {}

    @abstractmethod
    def start(self) -> None:
        """Construct the engine and receive the first observations of all envs."""

    @abstractmethod
    def advance(self) -> int:
        """Step one batch, read a few elements of the result, and return the number of env steps."""

    @abstractmethod
    def close(self) -> None:
        """Close the engine and end its processes."""

    def next_actions(self) -> np.ndarray[Any, Any]:
        """Return the next batch of actions from the ring: [num_envs, ...]."""
        self.turn = turn = (self.turn + 1) & 63
        return self.actions[turn]

    def record_times(self, obs: np.ndarray[Any, Any]) -> None:
        """Record the env time that timed envs report: obs [B, 2] float64 of (seconds used, number of the object)."""
        self._used_s.update(zip(obs[:, 1].tolist(), obs[:, 0].tolist(), strict=True))

    def run(self, seconds: float) -> Round:
        """Advance for about `seconds`. The loop's overhead is one call per batch, and one reading of the clock per chunk."""
        advance = self.advance
        clock = time.perf_counter
        chunk = self._chunk_size()
        used_before = dict(self._used_s)
        steps = 0
        resets = 0.0
        start = now = clock()
        while now - start < seconds:
            for _ in range(chunk):
                steps += advance()
            if self.ended is not None:
                resets += chunk * (np.count_nonzero(self.ended[0]) + np.count_nonzero(self.ended[1]))
            now = clock()
        return Round(steps - resets, now - start, self._env_time_since(used_before) if self.job.is_timed else None)

    def _chunk_size(self) -> int:
        start = time.perf_counter()
        for _ in range(WARM_BATCHES):
            self.advance()
        return max(1, int(CHUNK_S / ((time.perf_counter() - start) / WARM_BATCHES)))

    def _env_time_since(self, before: dict[float, float]) -> float:
        return sum(used - before.get(serial, 0.0) for serial, used in self._used_s.items())


def flags_at_once(terminated: np.ndarray[Any, Any], truncated: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the indices of envs whose episode ended, or None; for engines that leave resets to the caller."""
    ended = np.logical_or(terminated, truncated)
    return np.flatnonzero(ended) if ended.any() else None
