"""Random evaluations. The model plays each episode by itself, and knows which attempts fail."""

from __future__ import annotations

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

import stepmill

RAISE, BAD, DIE = "raise", "bad output", "die"
Script = dict[tuple[int, int], tuple[str, int, int]]
"""By level and seed of an episode: how its first attempts fail, at which step (0 is the reset), and how many of them."""


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """Plays an episode that level, seed and actions determine, and fails as its script says."""

    observation_space, action_space = spaces.Box(0, 2**20, (3,), np.int64), spaces.Discrete(3)

    def __init__(self, folder: Path, script: Script) -> None:
        self._folder, self._script = folder, script

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        assert seed is not None
        self._key = ((options or {}).get("level", 0), seed)
        self._state, self._num_steps = 7 * self._key[0] + seed, 0
        how, at, times = self._script.get(self._key, (RAISE, -1, 0))
        mark = self._folder / f"{self._key}"
        num_failed = len(mark.read_bytes()) if mark.exists() else 0
        self._failure = (how, at) if num_failed < times else (how, -1)
        self._mark = mark
        return self._answer(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        self._state = (self._state * 31 + int(action)) % 1009
        is_over = self._state % 5 == 0 or self._num_steps == 9
        infos = {"state": self._state, "is_success": self._state % 2 == 0, "fault": "of the env"} if is_over else {}
        return self._answer(), self._state / 8, is_over and self._state % 3 > 0, is_over and self._state % 3 == 0, infos

    def _answer(self) -> Any:
        how, at = self._failure
        if at == self._num_steps:
            with self._mark.open("ab") as file:
                file.write(b"x")
            if how == DIE:
                os.kill(os.getpid(), signal.SIGKILL)
            if how == BAD:
                return "no observation"
            raise ValueError("the script says so")
        return np.array([self._state, self._num_steps, self._key[0]], np.int64)


def policy(obs: Any) -> Any:
    """Act on each row by itself."""
    return (obs[:, 0] + obs[:, 1]) % 3


def episode_alone(level: int, seed: int) -> tuple[float, int, bool, dict[str, Any]]:
    """Return the results of an episode without failures."""
    env = ScriptedEnv(Path(), {})
    obs, _ = env.reset(seed=seed, options={"level": level})
    total, is_over = 0.0, False
    while not is_over:
        obs, reward, terminated, truncated, info = env.step(policy(obs[None])[0])
        total, is_over = total + reward, terminated or truncated
    return total, int(obs[1]), info["is_success"], {"state": info["state"], "fault": "of the env"}


class Interrupted(Exception):
    """Raised by a policy in the middle of an evaluation."""


def play(number: int, folder: Path) -> None:
    """Play the evaluation of a number, and assert what it returns."""
    rng = random.Random(number)
    backend = rng.choice(["serial", "serial", "thread", "thread", "process"])
    levels = rng.sample(range(4), rng.randint(1, 3))
    seeds = rng.sample(range(50), rng.randint(1, 12))
    kinds = [RAISE, BAD, DIE] if backend == "process" else [RAISE, BAD]
    script: Script = {
        (level, seed): (rng.choice(kinds), rng.randint(0, 3), rng.choice([1, 1, 2, 99]))
        for level in levels
        for seed in seeds
        if rng.random() < 0.1
    }
    retries = rng.randint(0, 2)
    options: dict[str, Any] = {"backend": backend, "num_envs": rng.randint(1, 6), "retries": retries}
    options |= {"infos": ["state", "fault"], "batch_size": rng.choice([None, None, 3, "fixed"]), "progress": False}
    options["restarts"] = {"restart_window_s": 0.02, "max_restarts": 10**6, "max_env_errors": 10**6}
    if backend == "process":
        options |= {"context": "fork", "num_workers": rng.randint(1, 2)}
    make = partial(ScriptedEnv, folder, script)
    given = {"env": make, "tasks": {f"level {level}": {"level": level} for level in levels}, "seeds": seeds, **options}
    if rng.random() < 0.3:
        given["resume"] = folder / "resume.jsonl"
        _interrupt(given, rng.randint(1, 20))
    found = stepmill.evaluate(policy, **given)
    order = [(f"level {level}", seed) for level in levels for seed in seeds]
    assert [(each.task, each.seed) for each in found.episodes] == order
    for episode in found.episodes:
        key = int(str(episode.task).split()[1]), episode.seed
        _check(episode, key, script.get(key), retries, is_exact=backend != "process" and "resume" not in given)


def _interrupt(given: dict[str, Any], num_calls: int) -> None:
    """Begin an evaluation with the same file, and end it after some calls of the policy."""
    left = num_calls

    def until(obs: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise Interrupted
        return policy(obs)

    until.__qualname__ = policy.__qualname__
    try:
        stepmill.evaluate(until, **given)
    except Interrupted:
        pass


def _check(
    episode: stepmill.Episode,
    key: tuple[int, int],
    failure: tuple[str, int, int] | None,
    retries: int,
    *,
    is_exact: bool,
) -> None:
    length = episode_alone(*key)[1]
    how, _, times = failure if failure is not None and failure[1] <= length else (RAISE, 0, 0)
    if times <= retries or not is_exact:
        if episode.fault is None:
            played = episode.episode_return, episode.length, episode.success, dict(episode.infos)
            assert played == episode_alone(*key), (key, played)
        assert not is_exact or (episode.fault is None and episode.attempts == times + 1), (key, episode)
        assert episode.fault is None or times or how == DIE, (key, episode)
    else:
        assert episode.fault is not None, (key, episode)
        assert episode.attempts == retries + 1, (key, episode)
    if times == 0 and how == RAISE:
        assert episode.fault is None, (key, episode)
