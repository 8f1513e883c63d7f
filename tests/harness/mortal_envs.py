"""Envs that kill their own process at a chosen command of a life, and a learner that checks every result of theirs."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

import stepmill
from stepmill.spec.errors import WorkerDied
from tests.harness.hangs import HANG_GUARD_S

LENGTH = 40
LARGE = 90  # the action whose info is large
LARGE_BYTES = 20 << 20
IDENTITY, TAG, CLOCK, TOTAL, BUMPS = range(5)
LONGEST_LIFE = 60  # commands of a life that ends by chance

Obs = NDArray[np.int64]


class MortalEnv(gymnasium.Env[Obs, np.int64]):
    """Counts the commands of its life (resets, steps, calls), and is killed in the one that its folder names.

    obs [5]: identity, a number drawn at reset, clock, a sum over all actions of the episode, number of calls.
    A file `plan-<identity>` has a line for each life to come, with the number of the command that ends it, from 0 on.
    Without such a file, `seed` draws for every life but the first whether and when it ends.
    """

    observation_space = gymnasium.spaces.Box(0, 2**62, (5,), np.int64)
    action_space = gymnasium.spaces.Discrete(100)

    def __init__(self, folder: Path, identity: int, seed: int | None = None) -> None:
        self._folder, self._identity = folder, identity
        self._bumps = 0
        self._num_commands = 0
        self._last_command = self._planned_end() if seed is None else self._drawn_end(seed)

    def _planned_end(self) -> int | None:
        plan = self._folder / f"plan-{self._identity}"
        lines = plan.read_text().split() if plan.exists() else []
        if lines:
            plan.write_text("\n".join(lines[1:]))
        return int(lines[0]) if lines else None

    def _drawn_end(self, seed: int) -> int | None:
        life = append_byte(self._folder / f"lives-{self._identity}")
        rng = random.Random(f"{seed} {self._identity} {life}")
        return rng.randrange(LONGEST_LIFE) if life > 1 and rng.random() < 0.6 else None

    def _live(self) -> None:
        if self._num_commands == self._last_command:
            append_byte(self._folder / "kills")
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_commands += 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self._live()
        self._tag, self._clock, self._total = int(self.np_random.integers(1, 1000)), 0, 0
        return self._observe(), {}

    def step(self, action: np.int64) -> Any:
        self._live()
        self._clock += 1
        self._total += int(action) * self._clock + self._tag
        info = {"page": np.full(LARGE_BYTES, self._clock, np.uint8)} if action == LARGE else {}
        return self._observe(), float(self._total), self._clock >= LENGTH, False, info

    def bump(self) -> int:
        """Count a call, which no reset takes back."""
        self._bumps += 1
        self._live()
        return self._bumps

    def _observe(self) -> Obs:
        return np.array([self._identity, self._tag, self._clock, self._total, self._bumps], np.int64)


def append_byte(path: Path) -> int:
    """Append a byte to a file; return its size in bytes."""
    with open(path, "ab") as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_size


def plan_lives(folder: Path, env_id: int, ends: list[int]) -> None:
    """Say at which command each of the next lives of an env ends; those after them do not."""
    (folder / f"plan-{env_id}").write_text("\n".join(map(str, ends)))


@dataclass
class EnvModel:
    """What is known of an env.

    Attributes:
        obs: the last one received.
        action: of the step under way.
        bumps: how many calls it may have had by now: more than one number after a call that died.
        bumps_before: the same when the step under way was sent, which calls made since come after.
        is_called: whether there were such calls.
    """

    obs: list[int]
    is_over: bool = False
    is_pending: bool = False
    action: int = 0
    bumps: set[int] = field(default_factory=lambda: {0})
    bumps_before: set[int] = field(default_factory=lambda: {0})
    is_called: bool = False


class CheckingLearner:
    """Drives a pool of MortalEnvs under "replay" and compares every result with what must come.

    Attributes:
        counts: results by what they were: "first", "next", "cut".
        wrong: what was not as it must be, in words.
    """

    def __init__(self, pool: stepmill.Pool, seed: int = 0) -> None:
        self.pool = pool
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.models = [EnvModel(row.tolist()) for row in pool.reset(seed=seed).obs]

    def ids(self, *, is_pending: bool) -> list[int]:
        """Return the envs that have a command, or those that have none."""
        return [env_id for env_id, model in enumerate(self.models) if model.is_pending is is_pending]

    def send(self, actions: list[int], env_ids: list[int]) -> None:
        """Command steps."""
        self.pool.send(np.array(actions), env_ids)
        for env_id, action in zip(env_ids, actions, strict=True):
            model = self.models[env_id]
            model.is_pending, model.action, model.bumps_before = True, action, set(model.bumps)
            model.is_called = False

    def receive(self, num_envs: int | None = None) -> None:
        """Receive results of some envs, or of all that are pending, and check them."""
        num_envs = len(self.ids(is_pending=True)) if num_envs is None else num_envs
        if num_envs == 0:
            return
        batch = self.pool.recv(num_envs, timeout_s=HANG_GUARD_S)
        for place, env_id in enumerate(batch.env_id.tolist()):
            model = self.models[env_id]
            told = model.obs, model.action, model.is_over
            complaint = "it had no command" if not model.is_pending else self._check(model, batch, place)
            if complaint:
                obs, reward = batch.obs[place].tolist(), float(batch.reward[place])
                self.wrong.append(f"env {env_id}: {complaint}: {obs}, {reward}, after {told}")
            model.obs, model.is_pending = batch.obs[place].tolist(), False
            if not (model.is_called or complaint or batch.truncated[place]):  # what is cut short shows what was before
                model.bumps = {model.obs[BUMPS]}

    def step(self, actions: list[int]) -> None:
        """Step all envs, and check the results."""
        self.send(actions, list(range(len(self.models))))
        self.receive()

    def _check(self, model: EnvModel, batch: stepmill.Batch, place: int) -> str:
        obs, reward = batch.obs[place].tolist(), float(batch.reward[place])
        ends = bool(batch.terminated[place]), bool(batch.truncated[place])
        was_over, model.is_over = model.is_over, any(ends)
        if was_over:
            self.counts["first"] += 1
            is_first = obs[CLOCK] == obs[TOTAL] == 0 and not any(ends) and reward == 0.0
            return "" if is_first and obs[BUMPS] in model.bumps_before else "not the first result of an episode"
        if ends[1]:
            self.counts["cut"] += 1
            is_last = obs == model.obs and reward == 0.0 and not ends[0]
            is_told = "not_replayable" in batch.info["fault"]
            return "" if is_last and is_told else "cut short, and not with the last observation received"
        self.counts["next"] += 1
        clock = model.obs[CLOCK] + 1
        total = model.obs[TOTAL] + model.action * clock + model.obs[TAG]
        wanted = [model.obs[IDENTITY], model.obs[TAG], clock, total]
        if obs[:BUMPS] != wanted or reward != total or ends[0] != (clock >= LENGTH):
            return f"not the next result, {wanted}"
        if obs[BUMPS] not in model.bumps_before:
            return f"calls were lost or doubled: one of {model.bumps_before} was expected"
        return "" if model.action != LARGE else _check_page(batch, place, clock)

    def call(self, env_id: int) -> None:
        """Call an env. A call whose worker dies may have been made or not."""
        model = self.models[env_id]
        model.is_called = True
        try:
            (bumps,) = self.pool.call("bump", env_ids=[env_id])
        except WorkerDied:
            self.counts["calls that died"] += 1
            model.bumps = model.bumps | {bumps + 1 for bumps in model.bumps}
            return
        self.counts["calls"] += 1
        if bumps - 1 not in model.bumps:
            self.wrong.append(f"env {env_id}: call number {bumps} after one of {model.bumps}")
        model.bumps = {bumps}


def _check_page(batch: stepmill.Batch, place: int, clock: int) -> str:
    page = batch.info["page"][place] if "page" in batch.info and batch.info["_page"][place] else np.zeros(0)
    return "" if len(page) == LARGE_BYTES and (page[::4096] == clock).all() else "its large info is not its own"


def make_pool(folder: Path, num_envs: int, num_workers: int, seed: int | None = None) -> stepmill.Pool:
    """Build a pool of MortalEnvs whose restarts are not limited and wait for nothing."""
    options = stepmill.PoolOptions(
        on_fault="replay",
        seeding="per_episode",
        context="fork",
        restarts={"max_restarts": 10**9, "restart_window_s": 0.001},
    )
    env_fns = [partial(MortalEnv, folder, env_id, seed) for env_id in range(num_envs)]
    return stepmill.Pool(env_fns, backend="process", num_workers=num_workers, options=options)


def kill_at_random(
    folder: Path, num_kills: int, seed: int, *, envs_per_worker: int, has_calls: bool, has_large_infos: bool = False
) -> tuple[Counter[str], list[str]]:
    """Step a pool until so many processes were killed; return what was counted, and what was wrong.

    Envs end their own processes at a command drawn from `seed`, most of them while they are replayed; others are killed
    by the learner, whatever they are at.
    """
    rng = random.Random(seed)
    num_killed = 0
    with make_pool(folder, 2 * envs_per_worker, 2, seed) as pool:
        learner = CheckingLearner(pool, seed)
        kills = folder / "kills"
        while num_killed + (kills.stat().st_size if kills.exists() else 0) < num_kills:
            idle = learner.ids(is_pending=False)
            chosen = sorted(rng.sample(idle, rng.randint(0, len(idle))))
            if rng.random() < 0.05:
                num_killed += _kill_one(pool, rng)
            if chosen:
                is_large = has_large_infos and rng.random() < 0.005
                learner.send([LARGE if is_large else rng.randrange(LARGE) for _ in chosen], chosen)
            if rng.random() < 0.05:
                num_killed += _kill_one(pool, rng)
            if has_calls and rng.random() < 0.1:
                learner.call(rng.randrange(len(learner.models)))
            pending = learner.ids(is_pending=True)
            if pending:
                learner.receive(rng.randint(1, len(pending)))
        learner.receive()
        learner.counts["kills from outside"] = num_killed
        learner.counts["kills"] = num_killed + kills.stat().st_size
        learner.counts["restarts"] = pool._recovery.workers.num_restarts
    return learner.counts, learner.wrong


def _kill_one(pool: stepmill.Pool, rng: random.Random) -> int:
    try:
        os.kill(rng.choice(pool.stats().workers).pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1
