"""Drives a pool with a policy, and yields snapshots of the run: plain data, which monitor.py and report.py show.

    Run.snapshots(interval_s) ──► Snapshot, Snapshot, ...      for monitor.py and report.py
        └── pool.recv(batch_size) ─► policy ─► pool.send(…), to all envs, or to those that were received

Only steps are counted. Every episode begins with the result of a reset, which is not a step.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean
from time import perf_counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from stepmill.observe.catalog import Policy, batch_actions
from stepmill.spec.errors import RecvTimeout, StepmillError
from stepmill.spec.stats import PoolStats

if TYPE_CHECKING:
    from stepmill.pool.pool import Pool
    from stepmill.spec.batch import Batch

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
class Snapshot:
    """The state of a run at one moment.

    `total` has the pool's statistics since its start, and `recent` those since the previous snapshot; in the last snapshot they
    cover the whole run. `episodes` is the summary of an `EpisodeTally`.
    `policy_share` and `pool_share` are the shares of wall time that this process spent in the policy and in the pool.
    `silent` lists the envs that have not answered for much longer than any answer took, and `silence_s` is the longest of these
    silences in seconds.
    """

    elapsed_s: float
    steps: int
    batches: int
    episodes: SimpleNamespace
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
    return_min: float = math.inf
    return_max: float = -math.inf
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

    def summary(self) -> SimpleNamespace:
        """Return statistics of the episodes; means are NaN before the first one, and `recent` covers the last 100."""
        count = self.count or math.nan
        recent_returns, recent_lengths = zip(*self.recent, strict=True) if self.recent else ((math.nan,),) * 2
        return SimpleNamespace(
            count=self.count,
            return_mean=self.return_sum / count,
            return_min=self.return_min,
            return_max=self.return_max,
            length_mean=self.length_sum / count,
            recent_return_mean=fmean(recent_returns),
            recent_length_mean=fmean(recent_lengths),
        )


# An env is reported as silent if, when the run ends, it has not answered for this many seconds ...
SILENT_S = 1.0
# ... and for this many times the longest time that any answer took.
SILENT_FACTOR = 10
RECV_SLICE_S = 0.25


class PolicyError(StepmillError):
    """The user's policy raised an exception, which is chained as the cause."""


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """How many envs to run, and for how many steps and seconds. None means no limit; the run ends at the first that is reached."""

    num_envs: int
    batch_size: int
    steps: int | None = None
    seconds: float | None = None
    seed: int | None = None


class Run:
    """One run of a pool under a policy. Iterate `snapshots` to drive it; `finish` returns the totals at any time."""

    def __init__(self, pool: Pool, policy: Policy, plan: RunPlan) -> None:
        self._pool = pool
        self._policy = policy
        self._action_space = batch_actions(pool.single_action_space, plan.batch_size, plan.seed)
        self._plan = plan
        self._episodes = EpisodeTally()
        # The first result of every env is a reset, and so is, under NEXT_STEP, the result after a finished episode.
        self._is_reset_due = np.ones(plan.num_envs, np.bool_)
        self._steps = 0
        self._batches = 0
        self._policy_s = 0.0
        self._pool_s = 0.0
        self._sent_s = np.full(plan.num_envs, perf_counter())  # when each env was given its last command
        self._slowest_s = 0.0
        self._begun_s = perf_counter()
        self._first = pool.stats()

    def snapshots(self, interval_s: float) -> Iterator[Snapshot]:
        """Run to the end of the plan, and yield a snapshot about every `interval_s` seconds.

        Raises:
            PolicyError: the policy raised.
            StepmillError: the pool raised.
        """
        shown_s, shown = self._begun_s, self._first
        for now_s in self._advance():
            if self._is_over(now_s):
                return
            if now_s - shown_s >= interval_s:
                snapshot = self._take_snapshot(since=shown)
                shown_s, shown = now_s, snapshot.total
                yield snapshot

    def finish(self) -> Snapshot:
        """Return the totals since the start of the run, even if it was interrupted."""
        return self._take_snapshot(since=self._first)

    def _silent_envs(self, now_s: float) -> tuple[tuple[int, ...], float]:
        """Return the envs that have not answered for much longer than any answer took, and the longest silence in seconds."""
        silence_s = now_s - self._sent_s
        silent = np.flatnonzero(silence_s > max(SILENT_S, SILENT_FACTOR * self._slowest_s)).tolist()
        return tuple(silent), float(silence_s.max()) if silent else 0.0

    def _advance(self) -> Iterator[float]:
        """Yield the time in seconds after each batch, and after each `RECV_SLICE_S` without one, to update the view."""
        is_in_step = self._plan.batch_size == self._plan.num_envs
        self._pool.reset_async(seed=self._plan.seed)
        self._sent_s[:] = perf_counter()
        while True:
            begun_s = perf_counter()
            try:
                batch = self._pool.recv(self._plan.batch_size, timeout_s=RECV_SLICE_S)
            except RecvTimeout:
                now_s = perf_counter()
                self._pool_s += now_s - begun_s
                yield now_s
                continue
            came_s = perf_counter()
            self._pool_s += came_s - begun_s
            self._slowest_s = max(self._slowest_s, came_s - float(self._sent_s[batch.env_id].min()))
            actions, acted_s = self._act(batch)
            # Send before counting, so that the envs do not wait for the counting.
            self._pool.send(actions, None if is_in_step else batch.env_id)
            now_s = perf_counter()
            self._sent_s[batch.env_id] = now_s
            self._pool_s += now_s - acted_s
            self._count(batch)
            yield now_s

    def _act(self, batch: Batch) -> tuple[object, float]:
        """Return the policy's actions and the time in seconds when the policy returned."""
        begun_s = perf_counter()
        try:
            actions = self._policy(batch.obs, self._action_space)
        except StepmillError:
            raise  # a recorder raised it, and it names its own cause
        except Exception as error:
            raise PolicyError(f"the policy raised {type(error).__name__}: {error}") from error
        acted_s = perf_counter()
        self._policy_s += acted_s - begun_s
        return actions, acted_s

    def _count(self, batch: Batch) -> None:
        """Count the steps of a batch and the episodes that ended in it."""
        due = self._is_reset_due
        num_resets = int(np.count_nonzero(due[batch.env_id]))
        ended = batch.terminated | batch.truncated
        due[batch.env_id] = ended
        self._steps += len(ended) - num_resets
        self._batches += 1
        if ended.any():
            episode = batch.info.get("episode")
            # An env may use the key "episode" itself; its value then replaces the pool's.
            if isinstance(episode, dict) and "r" in episode and "l" in episode:
                self._episodes.add(episode["r"][ended], episode["l"][ended])

    def _is_over(self, now_s: float) -> bool:
        plan = self._plan
        if plan.steps is not None and self._steps >= plan.steps:
            return True
        return plan.seconds is not None and now_s - self._begun_s >= plan.seconds

    def _take_snapshot(self, since: PoolStats) -> Snapshot:
        now, now_s = self._pool.stats(), perf_counter()
        elapsed_s = max(now_s - self._begun_s, 1e-9)
        silent, silence_s = self._silent_envs(now_s)
        return Snapshot(
            elapsed_s=elapsed_s,
            steps=self._steps,
            batches=self._batches,
            episodes=self._episodes.summary(),
            policy_share=self._policy_s / elapsed_s,
            pool_share=self._pool_s / elapsed_s,
            total=now,
            recent=now - since,
            silent=silent,
            silence_s=silence_s,
        )
