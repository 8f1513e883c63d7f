"""CleanRL's PPO, which goes on after the program was killed, with the numbers of a run that was never killed.

    python examples/cleanrl_ppo_resume.py FILE [--iterations 100] [--every 5] [--stop-at ITERATION]

Run it again with the same file to go on. Between two iterations it writes one file every few iterations, and on SIGTERM: network,
optimiser, random generators, and the envs in the middle of their episodes. The network is that of `cleanrl_ppo.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from cleanrl_ppo import Agent
from torch import nn, optim

import stepmill

NUM_ENVS, NUM_STEPS, EPOCHS, MINIBATCHES = 4, 128, 4, 4
RATE, GAMMA, LAMBDA, CLIP, ENTROPY, VALUE = 2.5e-4, 0.99, 0.95, 0.2, 0.01, 0.5
is_preempted = False


def preempt(*_: Any) -> None:
    """Let the iteration end, and then the program."""
    global is_preempted
    is_preempted = True


def write(path: Path, state: dict[str, Any]) -> None:
    """Write the file as a whole or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def rollout(
    agent: Any, envs: Any, newest: tuple[Any, Any], returns: list[float]
) -> tuple[dict[str, Any], tuple[Any, Any]]:
    """Step the envs, and return the flat batch, with advantages, and the newest observations and flags."""
    rows: dict[str, list[Any]] = {name: [] for name in ("obs", "action", "log_prob", "reward", "done", "value")}
    obs, done = newest
    for _ in range(NUM_STEPS):
        with torch.no_grad():
            action, log_prob, _, value = agent.get_action_and_value(obs)
        after, reward, terminated, truncated, infos = envs.step(action.numpy())
        step = (obs, action, log_prob, torch.from_numpy(reward).float(), done, value)
        for name, part in zip(rows, step, strict=True):
            rows[name].append(part)
        obs, done = torch.from_numpy(after.copy()), torch.from_numpy(terminated | truncated).float()
        if "episode" in infos:
            returns += infos["episode"]["r"][infos["_episode"]].tolist()
    batch = {name: torch.stack(parts) for name, parts in rows.items()}
    advantages, later = torch.zeros_like(batch["reward"]), torch.zeros(NUM_ENVS)
    with torch.no_grad():
        later_value, goes_on = agent.get_value(obs), 1 - done
    for t in reversed(range(NUM_STEPS)):
        delta = batch["reward"][t] + GAMMA * later_value * goes_on - batch["value"][t]
        advantages[t] = later = delta + GAMMA * LAMBDA * goes_on * later
        later_value, goes_on = batch["value"][t], 1 - batch["done"][t]
    batch |= {"advantage": advantages, "target": advantages + batch["value"]}
    return {name: part.flatten(0, 1) for name, part in batch.items()}, (obs, done)


def update(agent: Any, optimizer: Any, batch: dict[str, Any], shuffler: np.random.Generator) -> None:
    for _ in range(EPOCHS):
        for rows in torch.from_numpy(shuffler.permutation(NUM_ENVS * NUM_STEPS)).chunk(MINIBATCHES):
            _, log_prob, entropy, value = agent.get_action_and_value(batch["obs"][rows], batch["action"][rows])
            ratio = (log_prob - batch["log_prob"][rows]).exp()
            advantage = batch["advantage"][rows]
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            gain = torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
            loss = VALUE * 0.5 * ((value - batch["target"][rows]) ** 2).mean() - gain - ENTROPY * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", type=Path)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--every", type=int, default=5, help="iterations between two files")
    parser.add_argument("--stop-at", type=int, default=-1, help="end like a killed program before this iteration")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, preempt)
    torch.manual_seed(1)
    torch.set_num_threads(1)
    shuffler, first, returns = np.random.default_rng(1), 0, list[float]()
    options: Any = {"autoreset_mode": "SameStep", "episode_stats": True, "on_fault": "replay", "seeding": "per_episode"}
    envs = stepmill.VectorEnv([lambda: gym.make("CartPole-v1")] * NUM_ENVS, **options)
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=RATE, eps=1e-5)
    if args.file.exists():
        state = torch.load(args.file, weights_only=False)  # our own file
        agent.load_state_dict(state["agent"]), optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["torch"])
        shuffler.bit_generator.state = state["shuffler"]
        first, returns = state["iteration"], state["returns"]
        obs, _, terminated, truncated, _ = stepmill.restore(envs, state["envs"])
        done = terminated | truncated
    else:
        obs, done = envs.reset(seed=1)[0], np.zeros(NUM_ENVS, bool)
    newest = torch.from_numpy(obs.copy()), torch.from_numpy(done).float()
    for iteration in range(first, args.iterations):
        if iteration > first and (iteration % args.every == 0 or is_preempted):
            state = {"agent": agent.state_dict(), "optimizer": optimizer.state_dict(), "torch": torch.get_rng_state()}
            state |= {"shuffler": shuffler.bit_generator.state, "iteration": iteration, "returns": returns}
            write(args.file, state | {"envs": stepmill.save(envs, None)})
        if is_preempted or iteration == args.stop_at:
            os._exit(143)  # as if the machine were gone
        optimizer.param_groups[0]["lr"] = RATE * (1 - iteration / args.iterations)
        batch, newest = rollout(agent, envs, newest, returns)
        update(agent, optimizer, batch, shuffler)
    envs.close()
    weights = b"".join(each.detach().numpy().tobytes() for each in agent.parameters())
    print(f"mean return {np.mean(returns[-20:]):.1f}, weights {hashlib.sha256(weights).hexdigest()[:16]}")


if __name__ == "__main__":
    main()
