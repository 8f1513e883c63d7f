"""PPO from end to end: `python -m benchmarks.ppo [--tasks cartpole,halfcheetah] [--engines kernel,process,envpool,gymnasium]`.

One learner in plain PyTorch, with torch's default number of threads, collects through each engine until the task is solved. For
each seed the engines take turns, each in a process of its own. Printed are the medians over the seeds: seconds until it is solved,
and how they divide into the engine's steps and everything else. An engine that is not installed is left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np

import stepmill

NUM_WORKERS = 2
NUM_RETURNS = 40  # a task is solved when the mean of so many returns says so


@dataclass(frozen=True)
class Task:
    """What is learned, and how.

    Attributes:
        env_id: Gymnasium's id, which EnvPool has, too.
        solved: the mean return that counts as solved.
        num_envs, num_steps: of one rollout.
        num_epochs, num_minibatches: of one update.
        max_steps: env-steps after which a run gives up.
        entropy, rate, gamma, lam: PPO's coefficients.
    """

    env_id: str
    solved: float
    num_envs: int
    num_steps: int
    num_epochs: int
    num_minibatches: int
    max_steps: int
    entropy: float
    rate: float
    gamma: float
    lam: float


TASKS = {
    "cartpole": Task("CartPole-v1", 475.0, 64, 32, 10, 4, 1_000_000, 0.0, 2e-3, 0.98, 0.9),
    "halfcheetah": Task("HalfCheetah-v5", 1500.0, 64, 64, 10, 16, 3_000_000, 0.0, 5e-4, 0.99, 0.95),
}
ENGINES = ("kernel", "process", "envpool", "gymnasium")


def make_envs(engine: str, task: Task, seed: int) -> Any:
    """Return a vector env whose ended envs are reset by the next step."""
    if engine == "gymnasium":
        return gymnasium.make_vec(task.env_id, task.num_envs, vectorization_mode="async")
    if engine == "envpool":
        return import_module("envpool").make_gymnasium(
            task.env_id, num_envs=task.num_envs, num_threads=NUM_WORKERS, seed=seed
        )
    return stepmill.make_vec(task.env_id, task.num_envs, backend=engine, num_workers=NUM_WORKERS)


class Scale:
    """Running mean and variance of observations, with which they are normalised."""

    def __init__(self, size: int) -> None:
        self.mean, self.square, self.count = np.zeros(size), np.ones(size), 1e-4

    def update(self, obs: Any) -> None:
        """Add observations [B, size]."""
        count = self.count + len(obs)
        self.mean += (obs.mean(0) - self.mean) * (len(obs) / count)
        self.square += ((obs**2).mean(0) - self.square) * (len(obs) / count)
        self.count = count

    def __call__(self, obs: Any) -> Any:
        std = np.sqrt(np.maximum(self.square - self.mean**2, 1e-8))
        return np.clip((obs - self.mean) / std, -10, 10).astype(np.float32)


class Learner:
    """PPO for observations and actions that are vectors, or actions that are numbers from 0."""

    def __init__(self, task: Task, envs: Any, seed: int) -> None:
        import torch

        torch.manual_seed(seed)
        self.torch, self.task = torch, task
        self.is_discrete = isinstance(envs.single_action_space, gymnasium.spaces.Discrete)
        size = int(np.prod(envs.single_observation_space.shape))
        space = envs.single_action_space
        num_outputs = int(space.n) if self.is_discrete else int(np.prod(space.shape))
        self.scale = Scale(size)
        self.actor, self.critic = self._network(size, num_outputs), self._network(size, 1)
        self.log_std = torch.zeros(num_outputs, requires_grad=not self.is_discrete)
        self.parameters = [*self.actor.parameters(), *self.critic.parameters(), self.log_std]
        self.optimizer = torch.optim.Adam(self.parameters, lr=task.rate, eps=1e-5)

    def _network(self, num_inputs: int, num_outputs: int) -> Any:
        nn = self.torch.nn
        layers = [nn.Linear(num_inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs)]
        return nn.Sequential(*layers)

    def _policy(self, obs: Any) -> Any:
        out = self.actor(obs)
        if self.is_discrete:
            return self.torch.distributions.Categorical(logits=out)
        return self.torch.distributions.Independent(
            self.torch.distributions.Normal(out, self.log_std.exp().expand_as(out)), 1
        )

    def act(self, obs: Any) -> tuple[Any, Any, Any]:
        """Return actions, their log-probabilities and the values of normalised observations."""
        with self.torch.no_grad():
            tensor = self.torch.from_numpy(obs)
            policy = self._policy(tensor)
            action = policy.sample()
            return action.numpy(), policy.log_prob(action).numpy(), self.critic(tensor).squeeze(-1).numpy()

    def learn(self, rows: dict[str, Any], progress: float) -> None:
        """Do PPO's update on rows [T * N, ...]; `progress` from 0 to 1 anneals the rate."""
        torch, task = self.torch, self.task
        data = {name: torch.from_numpy(value) for name, value in rows.items()}
        for group in self.optimizer.param_groups:
            group["lr"] = task.rate * (1 - progress)
        for _ in range(task.num_epochs):
            for part in torch.randperm(len(data["obs"])).chunk(task.num_minibatches):
                advantage = data["advantage"][part]
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                policy = self._policy(data["obs"][part])
                ratio = (policy.log_prob(data["action"][part]) - data["log_prob"][part]).exp()
                gain = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
                error = (self.critic(data["obs"][part]).squeeze(-1) - data["target"][part]).pow(2).mean()
                loss = 0.5 * error - gain - task.entropy * policy.entropy().mean()
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()


@dataclass
class Outcome:
    """What one run took.

    Attributes:
        is_solved: whether the mean return was reached.
        env_steps: how many there were; steps that only reset an env are not counted.
        total_s: seconds, without the start of the envs.
        engine_s: seconds of it in the engine's `step`.
        mean_return: at the end.
    """

    is_solved: bool
    env_steps: int
    total_s: float
    engine_s: float
    mean_return: float


def run(task: Task, engine: str, seed: int) -> Outcome:
    """Learn a task through an engine."""
    envs = make_envs(engine, task, seed)
    try:
        return _run(task, envs, seed)
    finally:
        envs.close()


def _run(task: Task, envs: Any, seed: int) -> Outcome:
    learner = Learner(task, envs, seed)
    obs = np.asarray(envs.reset(seed=seed)[0])
    shape = (task.num_steps, task.num_envs)
    is_over, running = np.zeros(task.num_envs, bool), np.zeros(task.num_envs)
    returns: deque[float] = deque(maxlen=NUM_RETURNS)
    env_steps, engine_s, began = 0, 0.0, time.perf_counter()
    while env_steps < task.max_steps and not _is_solved(task, returns):
        rows: dict[str, list[Any]] = {
            name: [] for name in ("obs", "action", "log_prob", "value", "reward", "end", "valid")
        }
        for _ in range(task.num_steps):
            learner.scale.update(obs.reshape(task.num_envs, -1))
            scaled = learner.scale(obs.reshape(task.num_envs, -1))
            action, log_prob, value = learner.act(scaled)
            start = time.perf_counter()
            obs, reward, terminated, truncated, _ = envs.step(action)
            engine_s += time.perf_counter() - start
            valid, is_over = ~is_over, np.logical_or(terminated, truncated)
            running += reward * valid
            returns.extend(running[is_over].tolist())
            running[is_over] = 0.0
            for name, column in zip(rows, (scaled, action, log_prob, value, reward, is_over, valid), strict=True):
                rows[name].append(np.array(column))
            env_steps += int(valid.sum())
        columns = {name: np.stack(values) for name, values in rows.items()}
        last = learner.act(learner.scale(obs.reshape(task.num_envs, -1)))[2]
        advantage = _advantages(task, columns, last)
        keep = columns["valid"].reshape(-1)
        assert columns["reward"].shape == shape
        flat = {
            name: columns[name].reshape(-1, *columns[name].shape[2:])[keep] for name in ("obs", "action", "log_prob")
        }
        flat["advantage"] = advantage.reshape(-1)[keep]
        flat["target"] = (advantage + columns["value"]).reshape(-1)[keep]
        learner.learn(flat, min(env_steps / task.max_steps, 0.95))
    mean = float(np.mean(returns)) if returns else 0.0
    return Outcome(_is_solved(task, returns), env_steps, time.perf_counter() - began, engine_s, mean)


def _is_solved(task: Task, returns: deque[float]) -> bool:
    return len(returns) == NUM_RETURNS and float(np.mean(returns)) >= task.solved


def _advantages(task: Task, columns: dict[str, Any], last: Any) -> Any:
    """Return generalized advantages [T, N]. An episode's end counts as terminal, also where a time limit has cut it."""
    advantage, ahead = np.zeros_like(columns["value"]), np.zeros_like(last)
    following = last
    for t in reversed(range(task.num_steps)):
        goes_on = 1.0 - columns["end"][t]
        delta = columns["reward"][t] + task.gamma * following * goes_on - columns["value"][t]
        ahead = delta + task.gamma * task.lam * goes_on * ahead
        advantage[t] = ahead
        following = columns["value"][t]
    return advantage.astype(np.float32)


def main() -> None:
    """Let the engines take turns, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", default="cartpole,halfcheetah")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--one", nargs=3, metavar=("TASK", "ENGINE", "SEED"), help="one run; prints its outcome as JSON"
    )
    args = parser.parse_args()
    if args.one:
        task, engine, seed = args.one
        sys.stdout.write(json.dumps(vars(run(TASKS[task], engine, int(seed)))))
        return
    engines = [each for each in args.engines.split(",") if each != "envpool" or find_spec("envpool")]
    for name in args.tasks.split(","):
        outcomes: dict[str, list[Outcome]] = {engine: [] for engine in engines}
        for seed in range(args.seeds):
            for engine in engines:
                command = [sys.executable, "-W", "ignore", "-m", "benchmarks.ppo", "--one", name, engine, str(seed)]
                text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                outcomes[engine].append(Outcome(**json.loads(text[text.rindex("{") :])))
        _print_table(name, outcomes)


def _print_table(name: str, outcomes: dict[str, list[Outcome]]) -> None:
    task = TASKS[name]
    sys.stdout.write(f"{task.env_id}, {task.num_envs} envs, mean return {task.solved:g}\n")
    for engine, runs in outcomes.items():
        solved = sum(each.is_solved for each in runs)
        total, in_engine = statistics.median(r.total_s for r in runs), statistics.median(r.engine_s for r in runs)
        rate = statistics.median(r.env_steps / r.engine_s for r in runs)
        steps = statistics.median(r.env_steps for r in runs)
        sys.stdout.write(
            f"  {engine:<10} solved {solved} of {len(runs)}   {total:7.1f} s, of which {in_engine:6.1f} s in the engine   "
            f"{steps:>9,.0f} env-steps, {rate:>9,.0f} per second of the engine\n"
        )


if __name__ == "__main__":
    main()
