"""A training that is killed by SIGKILL at random moments, 20 times, has the learning curve of one that was never killed.

    python examples/kill_me.py [--kills 20] [--worker-kills 3] [--updates 80] [--plot FILE.svg]

`--kills` are of the whole program, and `--worker-kills` of one of its worker processes while its envs step.

The learner is PPO in NumPy on CartPole. After each update it writes one file: the running envs (`stepmill.save`), the network, the
optimiser and the random generator. A program that finds the file goes on from there. The two curves are compared number by number.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

import stepmill

NUM_ENVS, NUM_STEPS, EPOCHS, HIDDEN = 8, 128, 10, 64
GAMMA, LAMBDA, RATE, CLIP = 0.99, 0.95, 3e-3, 0.2


class Learner:
    """A network with one hidden layer: logits of the two actions, and the value."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.weights = [self.rng.normal(0, 0.5, (5, HIDDEN)), self.rng.normal(0, 0.01, (HIDDEN + 1, 3))]
        self.moments = [np.zeros_like(each) for each in 2 * self.weights]
        self.num_steps = 0

    def forward(self, obs: Any) -> tuple[Any, Any, Any]:
        """Return the inputs of both layers, probabilities [B, 2] and values [B]."""
        inputs = np.concatenate([obs, np.ones((len(obs), 1))], 1)
        hidden = np.concatenate([np.tanh(inputs @ self.weights[0]), np.ones((len(obs), 1))], 1)
        out = hidden @ self.weights[1]
        odds = np.exp(out[:, :2] - out[:, :2].max(1, keepdims=True))
        return (inputs, hidden), odds / odds.sum(1, keepdims=True), out[:, 2]

    def act(self, obs: Any, _: Any) -> tuple[Any, dict[str, Any]]:
        _, probabilities, _ = self.forward(obs)
        action = (self.rng.random(len(obs)) > probabilities[:, 0]).astype(np.int64)
        return action, {"probability": probabilities[np.arange(len(obs)), action]}

    def learn(self, batch: stepmill.RolloutBatch) -> None:
        values = self.forward(batch.obs.reshape(-1, 4))[2].reshape(batch.obs.shape[:2])
        advantages = batch.advantages(values, gamma=GAMMA, lam=LAMBDA)
        keep = batch.valid
        obs, action, old = batch.obs[:-1][keep], batch.action[keep], batch.extras["probability"][keep]
        target, advantage = (advantages + values[:-1])[keep], advantages[keep]
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(EPOCHS):
            (inputs, hidden), probabilities, value = self.forward(obs)
            chosen = probabilities[np.arange(len(obs)), action]
            ratio = chosen / old
            is_free = np.where(advantage > 0, ratio < 1 + CLIP, ratio > 1 - CLIP)
            slope = np.zeros((len(obs), 3))  # of the loss by the outputs
            slope[:, :2] = probabilities * (is_free * ratio * advantage)[:, np.newaxis]
            slope[np.arange(len(obs)), action] -= is_free * ratio * advantage
            slope[:, 2] = 0.5 * np.clip(value - target, -10, 10)
            slope /= len(obs)
            inner = (slope @ self.weights[1][:-1].T) * (1 - hidden[:, :-1] ** 2)
            self.descend([inputs.T @ inner, hidden.T @ slope])

    def descend(self, slopes: list[Any]) -> None:
        self.num_steps += 1
        for at, slope in enumerate(slopes):
            mean, square = self.moments[at], self.moments[at + 2]
            mean += 0.1 * (slope - mean)
            square += 0.001 * (slope**2 - square)
            rate = RATE * np.sqrt(1 - 0.999**self.num_steps) / (1 - 0.9**self.num_steps)
            self.weights[at] -= rate * mean / (np.sqrt(square) + 1e-8)


def train(path: Path, num_updates: int, worker_kills: int) -> None:
    """Train to the end, from the file if there is one. Write it after each update. A worker is killed in the first updates."""
    make = partial(gymnasium.make, "CartPole-v1")
    options = {"backend": "process", "num_workers": 2, "on_fault": "replay", "seeding": "per_episode"}
    with stepmill.Pool([make] * NUM_ENVS, **options) as pool:
        rollout, learner, curve = stepmill.Rollout(pool, NUM_STEPS), Learner(seed=1), []
        if path.exists():
            learner, curve, envs = pickle.loads(path.read_bytes())  # our own file
            stepmill.restore(rollout, envs)
        else:
            rollout.reset(seed=1)
        while len(curve) < num_updates:
            if len(curve) < worker_kills:
                threading.Timer(0.02, os.kill, (pool.stats().workers[0].pid, signal.SIGKILL)).start()
            batch = rollout.collect(learner.act)
            learner.learn(batch)
            curve.append(float(np.mean([each["r"] for each in batch.episodes] or [NUM_STEPS])))
            with path.with_suffix(".part").open("wb") as file:
                pickle.dump((learner, curve, stepmill.save(rollout, None)), file)
                file.flush()
                os.fsync(file.fileno())
            path.with_suffix(".part").replace(path)  # the file is written as a whole or not at all
            print("updated", flush=True)  # for the program that kills this one


def run(path: Path, num_updates: int, kills: int, worker_kills: int) -> Any:
    """Run the training in a process, which is killed `kills` times. Return its curve, and then a number for each weight."""
    chance = random.Random(0)
    command = [sys.executable, __file__, "--train", path, f"--updates={num_updates}", f"--worker-kills={worker_kills}"]
    for count in range(kills + 1):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            if count < kills:
                kill(process, num_updates // (kills + 1), chance)
            process.communicate()
        if process.returncode == 0:
            learner, curve, _ = pickle.loads(path.read_bytes())
            digest = hashlib.sha256(b"".join(each.tobytes() for each in learner.weights)).hexdigest()[:12]
            killed = (
                f"program killed {count} times, workers {worker_kills} times"
                if count + worker_kills
                else "never killed"
            )
            print(f"{killed:48}{drawn(curve)} {curve[0]:.0f} to {curve[-1]:.0f}, weights {digest}")
            return curve + [float(each) for weights in learner.weights for each in weights.flat]
    raise SystemExit(f"the training ended with status {process.returncode}")


def kill(process: subprocess.Popen[bytes], max_updates: int, chance: random.Random) -> None:
    """Kill a training at a random moment after its next updates."""
    assert process.stdout is not None
    for _ in range(chance.randint(1, max_updates)):
        process.stdout.readline()
    time.sleep(chance.uniform(0, 0.1))
    process.kill()


def drawn(curve: list[float]) -> str:
    """Return a curve as text: a bar of one to eight eighths for each of 40 moments."""
    points = [curve[place * len(curve) // 40] for place in range(40)]
    return "".join("▁▂▃▄▅▆▇█"[int(7 * point / max(points))] for point in points)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--kills", type=int, default=20)
    add("--worker-kills", type=int, default=3)
    add("--updates", type=int, default=80)
    add("--plot", help="draw both curves to this file, with matplotlib")
    add("--train", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.train, args.updates, args.worker_kills)
        return
    print(
        f"A training, and then the same one: its program is killed {args.kills} times, its workers {args.worker_kills} times."
    )
    with tempfile.TemporaryDirectory() as folder:
        undisturbed = run(Path(folder, "undisturbed"), args.updates, 0, 0)
        killed = run(Path(folder, "killed"), args.updates, args.kills, args.worker_kills)
    differing = sum(a != b for a, b in zip(undisturbed, killed, strict=True))
    first, last = undisturbed[0], undisturbed[args.updates - 1]
    print(f"mean return {first:.0f}, then {last:.0f}; {differing} of {len(killed)} numbers of curve and weights differ")
    if args.plot:
        import matplotlib.pyplot as plt

        plt.figure(figsize=(7.2, 3), layout="constrained")
        plt.plot(undisturbed[: args.updates], linewidth=7, color="#9ecae1", label="never killed")
        plt.plot(killed[: args.updates], color="#08519c", label=f"killed {args.kills} times, and started again")
        plt.legend(frameon=False)
        plt.ylabel("mean return after each update")
        plt.savefig(args.plot)
    assert differing == 0
    assert args.updates < 40 or last > 3 * first


if __name__ == "__main__":
    main()
