"""Envs that kill their own process at a chosen command of a life, and a learner that checks every result of theirs."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import stepmill
from stepmill.spec.errors import StepmillError, UsageError, WorkerDied
from tests.chaos.report import ChaosReport
from tests.chaos.storm import StormModel
from tests.pool_model.calls import Calls
from tests.pool_model.commands import Commands
from tests.pool_model.envs import BUMPS, ONCE, HistoryEnv, Obs, Place
from tests.pool_model.records import Env, Row
from tests.pool_model.results import Result, require
from tests.pool_model.setup import Setup

LENGTH = 40
LARGE = 90 * ONCE  # the action whose info is large
LARGE_BYTES = 20 << 20
LONGEST_LIFE = 60  # commands of a life that ends by chance
OPTIONS = {"on_fault": "replay", "seeding": "per_episode", "autoreset_mode": "NextStep"}


class MortalEnv(HistoryEnv):
    """Counts the commands of its life (resets, steps, calls), and is killed in the one that its folder names.

    A file `plan-<identity>` has a line for each life to come, with the number of the command that ends it, from 0 on.
    Without such a file, `seed` draws for every life but the first whether and when it ends.
    """

    def __init__(self, folder: Path, identity: int, seed: int | None = None) -> None:
        super().__init__(identity, str(folder), LENGTH)
        self._num_commands = 0
        self._last_command = self._planned_end() if seed is None else self._drawn_end(seed)

    def _planned_end(self) -> int | None:
        plan = self._folder / f"plan-{self.identity}"
        lines = plan.read_text().split() if plan.exists() else []
        if lines:
            plan.write_text("\n".join(lines[1:]))
        return int(lines[0]) if lines else None

    def _drawn_end(self, seed: int) -> int | None:
        life = append_byte(self._folder / f"lives-{self.identity}")
        rng = random.Random(f"{seed} {self.identity} {life}")
        return rng.randrange(LONGEST_LIFE) if life > 1 and rng.random() < 0.6 else None

    def _live(self) -> None:
        if self._num_commands == self._last_command:
            append_byte(self._folder / "kills")
            os.kill(os.getpid(), signal.SIGKILL)
        self._num_commands += 1

    def reset(self, **arguments: Any) -> Any:
        self._live()
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        self._live()
        *result, info = super().step(action)
        if action == LARGE:
            info["page"] = np.full(LARGE_BYTES, self.place.clock, np.uint8)
        return *result, info

    def bump(self) -> tuple[int, int]:
        counted = super().bump()
        self._live()
        return counted


def append_byte(path: Path) -> int:
    """Append a byte to a file; return its size in bytes."""
    with open(path, "ab") as file:
        file.write(b"x")
        file.flush()
        return os.fstat(file.fileno()).st_size


def plan_lives(folder: Path, env_id: int, ends: list[int]) -> None:
    """Say at which command each of the next lives of an env ends; those after them do not."""
    (folder / f"plan-{env_id}").write_text("\n".join(map(str, ends)))


class ReplayModel(StormModel):
    """Nothing is lost under "replay", but for episodes that are cut short and say why; `counts` has the results."""

    counts: Counter[str]

    def receive(self, env_id: int, results: Sequence[Result], num_ended: Sequence[int]) -> None:
        is_first = self.envs[env_id].rows[0].is_over
        super().receive(env_id, results, num_ended)
        self.counts["first" if is_first else "cut" if results[0].fault else "next"] += 1

    def _check_replay(self, env: Env, results: Sequence[Result]) -> None:
        text = str(results[0].fault)
        require("not_replayable" in text, f"env {env.env_id} was cut short, and not told why: {results}")
        require("gave another result" not in text, f"env {env.env_id} was not replayed as it was played: {results}")

    def _begin(self, env: Env, row: Row, place: int, obs: Obs) -> Place:
        assert env.command is not None
        bumps = env.command.known[place].bumps
        require(bumps is None or obs[BUMPS] in bumps, f"calls were lost or doubled: {obs}; one of {bumps} was expected")
        return super()._begin(env, row, place, obs)


class ReplayCalls(Calls):
    """Calls of which none may raise."""

    def check_error(self, error: StepmillError, refusal: type[UsageError] | None) -> None:
        require(False, f"{type(error).__name__}: {error}")


class CheckingLearner(Commands):
    """Drives a pool of MortalEnvs under "replay" and compares every result with what must come.

    Attributes:
        counts: results by what they were: "first", "next", "cut".
    """

    def __init__(self, pool: stepmill.Pool, seed: int = 0) -> None:
        num_envs = pool.num_envs
        options = {"backend": "process", **OPTIONS}
        setup = Setup("single", num_envs, options, (), (LENGTH,) * num_envs, is_stormy=True, hides_faults=True)
        super().__init__(ReplayCalls(setup, pool, [], ReplayModel))
        self.counts: Counter[str] = Counter()
        self.model.report, self.model.named, self.model.counts = ChaosReport(0), set(), self.counts
        self.reset(None, seed=seed)
        self.counts.clear()

    model: ReplayModel

    def step_all(self, number: int) -> None:
        """Step all envs with the action of this number, and check the results."""
        self.send(None, [number * ONCE] * self.pool.num_envs, is_careless=False)
        self.receive_all()

    def call(self, env_id: int) -> None:
        """Call an env. A call whose worker dies may have been made or not."""
        try:
            ((identity, bumps),) = self.pool.call("bump", env_ids=[env_id])
        except WorkerDied:
            self.counts["calls that died"] += 1
            self.model.record_failed_bump(self.model.envs[env_id])
            return
        self.counts["calls"] += 1
        require(identity == env_id, f"a call of env {env_id} was answered by object {identity}")
        self.model.record_bump(identity, bumps)

    def _receive(self, batch: stepmill.Batch) -> None:
        """Check and remove the large infos, which the model does not know."""
        pages = batch.info.pop("page", None)
        has_page = batch.info.pop("_page", np.zeros(len(batch.env_id), bool))
        for place, env_id in enumerate(batch.env_id.tolist()):
            env = self.model.envs[env_id]
            is_step = env.command is not None and not env.rows[0].is_over and not batch.truncated[place]
            is_wanted = is_step and env.command.actions == [LARGE]
            page, clock = pages[place] if has_page[place] else np.zeros(0), env.rows[0].place.clock + 1
            is_right = len(page) == LARGE_BYTES * is_wanted and (page[::4096] == clock).all()
            require(is_right, f"the large info of env {env_id} is not its own")
        super()._receive(batch)


def make_pool(folder: Path, num_envs: int, num_workers: int, seed: int | None = None) -> stepmill.Pool:
    """Build a pool of MortalEnvs whose restarts are not limited and wait for nothing."""
    options = stepmill.PoolOptions(
        **OPTIONS, context="fork", restarts={"max_restarts": 10**9, "restart_window_s": 0.001}
    )
    env_fns = [partial(MortalEnv, folder, env_id, seed) for env_id in range(num_envs)]
    return stepmill.Pool(env_fns, backend="process", num_workers=num_workers, options=options)


def kill_at_random(
    folder: Path, num_kills: int, seed: int, *, envs_per_worker: int, has_calls: bool, has_large_infos: bool = False
) -> Counter[str]:
    """Step a pool until so many processes were killed; return what was counted.

    Envs end their own processes at a command drawn from `seed`, most of them while they are replayed; others are killed
    by the learner, whatever they are at.
    """
    rng = random.Random(seed)
    num_killed = 0
    with make_pool(folder, 2 * envs_per_worker, 2, seed) as pool:
        learner = CheckingLearner(pool, seed)
        kills = folder / "kills"
        while num_killed + (kills.stat().st_size if kills.exists() else 0) < num_kills:
            idle = [env.env_id for env in learner.model.envs if not env.is_pending]
            chosen = sorted(rng.sample(idle, rng.randint(0, len(idle))))
            if rng.random() < 0.05:
                num_killed += _kill_one(pool, rng)
            if chosen:
                is_large = has_large_infos and rng.random() < 0.005
                actions = [LARGE if is_large else rng.randrange(90) * ONCE for _ in learner.model.envs]
                learner.send(chosen, actions, is_careless=False)
            if rng.random() < 0.05:
                num_killed += _kill_one(pool, rng)
            if has_calls and rng.random() < 0.1:
                learner.call(rng.randrange(pool.num_envs))
            if learner.model.num_pending:
                learner.recv(None, "count", rng.randint(1, learner.model.num_pending))
        learner.receive_all()
        learner.counts["kills from outside"] = num_killed
        learner.counts["kills"] = num_killed + kills.stat().st_size
        learner.counts["restarts"] = pool._recovery.workers.num_restarts
    return learner.counts


def _kill_one(pool: stepmill.Pool, rng: random.Random) -> int:
    try:
        os.kill(rng.choice(pool.stats().workers).pid, signal.SIGKILL)
    except ProcessLookupError:
        return 0
    return 1
