"""The state of a run at one moment, and the sums that it is computed from.

This is plain data: run.py fills it, monitor.py and report.py show it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.stats import PoolStats

NUM_RECENT_EPISODES = 100


@dataclass(frozen=True)
class Setup:
    """What the run consists of: the user's arguments and the properties of the pool."""

    env_id: str
    num_envs: int
    num_workers: int
    backend: str
    batch_size: int
    policy: str
    seed: int | None
    is_atari: bool
    start_s: float


@dataclass(frozen=True)
class Episodes:
    """Statistics of finished episodes, NaN before the first one. `recent` covers the last 100."""

    count: int
    return_mean: float
    return_min: float
    return_max: float
    length_mean: float
    recent_return_mean: float
    recent_length_mean: float


@dataclass(frozen=True)
class Snapshot:
    """The state of a run at one moment.

    `total` has the pool's statistics since its start, and `recent` those since the previous snapshot; in the last snapshot they
    cover the whole run.
    `policy_share` and `pool_share` are the shares of wall time that this process spent in the policy and in the pool.
    `silent` lists the envs that have not answered for much longer than any answer took, and `silence_s` is the longest of these
    silences in seconds.
    """

    elapsed_s: float
    steps: int
    batches: int
    episodes: Episodes
    policy_share: float
    pool_share: float
    total: PoolStats
    recent: PoolStats
    silent: tuple[int, ...] = ()
    silence_s: float = 0.0

    @property
    def steps_per_s(self) -> float:
        """Env steps per second since the start of the run."""
        return self.steps / max(self.elapsed_s, 1e-9)

    def workers(self) -> list[dict[str, Any]]:
        """Return what each worker did recently. Shares are of wall time, 0 to 1, though clocks are not read at the same moment.

        `env_share` is the time in steps and resets of envs, including the copying of their results.
        """
        span_s = max(self.recent.elapsed_s, 1e-9)
        return [
            {
                "worker": each.worker,
                "pid": each.pid,
                "steps": each.steps,
                "steps_per_s": each.steps / span_s,
                "resets": each.resets,
                "env_share": min(1.0, each.busy_s / span_s),
                "wait_share": min(1.0, each.wait_s / span_s),
            }
            for each in self.recent.workers
        ]


@dataclass
class EpisodeTally:
    """Sums over finished episodes."""

    count: int = 0
    return_sum: float = 0.0
    return_min: float = float("inf")
    return_max: float = float("-inf")
    length_sum: int = 0
    recent: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=NUM_RECENT_EPISODES))

    def add(self, returns: NDArray[np.float64], lengths: NDArray[np.int64]) -> None:
        """Count episodes that ended with these returns [k, ...] and lengths [k], k at least 1. Vectors count with their sum."""
        returns = returns.reshape(len(returns), -1).sum(axis=1)
        self.count += len(returns)
        self.return_sum += float(returns.sum())
        self.return_min = min(self.return_min, float(returns.min()))
        self.return_max = max(self.return_max, float(returns.max()))
        self.length_sum += int(lengths.sum())
        self.recent.extend(zip(returns.tolist(), lengths.tolist(), strict=True))

    def summary(self) -> Episodes:
        if not self.count:
            nan = float("nan")
            return Episodes(0, nan, nan, nan, nan, nan, nan)
        recent_return, recent_length = np.asarray(self.recent, np.float64).mean(axis=0).tolist()
        return Episodes(
            count=self.count,
            return_mean=self.return_sum / self.count,
            return_min=self.return_min,
            return_max=self.return_max,
            length_mean=self.length_sum / self.count,
            recent_return_mean=recent_return,
            recent_length_mean=recent_length,
        )
