"""Drives a pool with a policy, and yields what a viewer wants to know. Who shows it, and how, is not decided here.

    Run.snapshots(interval_s) ──► Snapshot, Snapshot, ...      for live.py and report.py
        └── pool.recv(batch_size) ─► policy ─► pool.send(…), to all envs, or to those that were received

Counted are steps of envs: the result of a reset, with which every episode begins, is not one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from stepmill.observe.policy import Policy
from stepmill.observe.snapshot import EpisodeTally, Snapshot, WorkerShare
from stepmill.spec.errors import RecvTimeout, StepmillError

if TYPE_CHECKING:
    import gymnasium

    from stepmill.pool.pool import Pool
    from stepmill.spec.batch import Batch

RECENT_S = 2.0
SILENT_S = 1.0  # an env that has not answered for so long when the run ends, and for
SILENT_FACTOR = 10  # so many times as long as any answer took, is told of
RECV_SLICE_S = 0.25


class PolicyError(StepmillError):
    """The policy that the user named raised; the cause is chained."""


@dataclass(frozen=True)
class RunPlan:
    """How long to run, and with what. None is no limit; the limit that is met first ends the run."""

    num_envs: int
    batch_size: int
    max_steps: int | None = None
    max_seconds: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class _WorkerClock:
    """A worker's counters since its start; times in seconds."""

    pid: int | None
    env_s: float
    wait_s: float
    steps: int
    resets: int


@dataclass(frozen=True)
class _Mark:
    """Counters at one moment, to take differences from."""

    at_s: float
    steps: int
    workers: dict[int, _WorkerClock]


class Run:
    """One run of a pool under a policy. Iterate `snapshots` to drive it; `finish` tells the whole at any time."""

    def __init__(self, pool: Pool, policy: Policy, action_space: gymnasium.Space[object], plan: RunPlan) -> None:
        self._pool = pool
        self._policy = policy
        self._action_space = action_space
        self._plan = plan
        self._episodes = EpisodeTally()
        # Every env begins with a reset; under NEXT_STEP the result after a finished episode is one again.
        self._is_reset_due = np.ones(plan.num_envs, np.bool_)
        self._steps = 0
        self._batches = 0
        self._policy_s = 0.0
        self._pool_s = 0.0
        self._sent_s = np.zeros(plan.num_envs)  # when each env was given its last command
        self._slowest_s = 0.0
        self._first = self._mark(perf_counter())
        self._marks: deque[_Mark] = deque([self._first])

    def snapshots(self, interval_s: float) -> Iterator[Snapshot]:
        """Run to the end of the plan, with a snapshot about every `interval_s` seconds while it lasts.

        Raises:
            PolicyError: the policy raised.
            StepmillError: whatever the pool raises.
        """
        shown_s = perf_counter()
        for now_s in self._advance():
            if self._is_over(now_s):
                return
            if now_s - shown_s >= interval_s:
                shown_s = now_s
                yield self._snapshot(now_s)

    def finish(self) -> Snapshot:
        """Return the totals: of the whole run, or of what was done until it was interrupted."""
        now = self._mark(perf_counter())
        return self._compose(now, since=self._first)

    def silent_envs(self) -> tuple[list[int], float]:
        """Return the envs that have not answered for much longer than any answer took, and since how many seconds."""
        silence_s = perf_counter() - self._sent_s
        silent = silence_s > max(SILENT_S, SILENT_FACTOR * self._slowest_s)
        return np.flatnonzero(silent).tolist(), float(silence_s.max())

    def _advance(self) -> Iterator[float]:
        """Yield the time in seconds after each batch, or after a slice of waiting in vain: a slow env freezes no view."""
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
            # Sent before it is counted: the envs need not wait for our books.
            self._pool.send(actions, None if is_in_step else batch.env_id)
            now_s = perf_counter()
            self._sent_s[batch.env_id] = now_s
            self._pool_s += now_s - acted_s
            self._count(batch)
            yield now_s

    def _act(self, batch: Batch) -> tuple[object, float]:
        """Return the policy's actions and the time in seconds when they were there."""
        begun_s = perf_counter()
        try:
            actions = self._policy(batch.obs, self._action_space)
        except Exception as error:
            raise PolicyError(f"the policy raised {type(error).__name__}: {error}") from error
        acted_s = perf_counter()
        self._policy_s += acted_s - begun_s
        return actions, acted_s

    def _count(self, batch: Batch) -> None:
        """Book a batch: steps, and the episodes that ended in it."""
        due = self._is_reset_due
        num_resets = int(np.count_nonzero(due[batch.env_id]))
        ended = batch.terminated | batch.truncated
        due[batch.env_id] = ended
        self._steps += len(ended) - num_resets
        self._batches += 1
        if ended.any():
            episode = batch.info.get("episode")
            # An env may have put something of its own under that name, which then stands in the place of the pool's.
            if isinstance(episode, dict) and "r" in episode and "l" in episode:
                self._episodes.add(episode["r"][ended], episode["l"][ended])

    def _is_over(self, now_s: float) -> bool:
        plan = self._plan
        if plan.max_steps is not None and self._steps >= plan.max_steps:
            return True
        return plan.max_seconds is not None and now_s - self._first.at_s >= plan.max_seconds

    def _snapshot(self, now_s: float) -> Snapshot:
        now = self._mark(now_s)
        self._marks.append(now)
        while len(self._marks) > 2 and self._marks[1].at_s < now_s - RECENT_S:
            self._marks.popleft()
        return self._compose(now, since=self._marks[0])

    def _compose(self, now: _Mark, since: _Mark) -> Snapshot:
        elapsed_s = max(now.at_s - self._first.at_s, 1e-9)
        recent_s = max(now.at_s - since.at_s, 1e-9)
        return Snapshot(
            elapsed_s=elapsed_s,
            steps=now.steps,
            steps_per_s=now.steps / elapsed_s,
            recent_steps_per_s=(now.steps - since.steps) / recent_s,
            batches=self._batches,
            episodes=self._episodes.summary(),
            policy_share=self._policy_s / elapsed_s,
            pool_share=self._pool_s / elapsed_s,
            workers=tuple(
                _share(worker, clock, since.workers.get(worker, clock), recent_s)
                for worker, clock in sorted(now.workers.items())
            ),
        )

    def _mark(self, at_s: float) -> _Mark:
        return _Mark(at_s, self._steps, _read_workers(self._pool))


def _read_workers(pool: Pool) -> dict[int, _WorkerClock]:
    return {
        each["worker"]: _WorkerClock(each["pid"], each["env_s"], each["wait_s"], each["steps"], each["resets"])
        for each in pool.stats()["workers"]
    }


def _share(worker: int, now: _WorkerClock, since: _WorkerClock, span_s: float) -> WorkerShare:
    return WorkerShare(
        worker=worker,
        pid=now.pid,
        steps=now.steps,
        steps_per_s=(now.steps - since.steps) / span_s,
        resets=now.resets,
        env_share=_clip((now.env_s - since.env_s) / span_s),
        wait_share=_clip((now.wait_s - since.wait_s) / span_s),
    )


def _clip(share: float) -> float:
    """Keep a share within 0 to 1: a worker's clock and ours are read one after the other."""
    return min(1.0, max(0.0, share))
