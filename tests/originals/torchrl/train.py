"""TorchRL's PPO on CartPole: `python -m tests.originals.torchrl.train WHOSE ITERATIONS`.

WHOSE is "ours" or "original": the class `ParallelEnv`. Collector, advantages, loss and replay buffer are TorchRL's. Prints, as its last line, JSON: what
was trained, env steps, return at the end, seconds, the learning curve, and a hash of the weights, which are the same for both classes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from functools import partial
from typing import Any

import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.envs import GymEnv, ParallelEnv, RewardSum, TransformedEnv, set_gym_backend
from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

NUM_ENVS, NUM_STEPS, NUM_EPOCHS, BATCH_SIZE = 8, 128, 8, 256
LEARNED = 60.0  # a random policy gets 22


def make_envs(whose: str) -> Any:
    """Return TorchRL's class or ours over the same envs."""
    make = partial(GymEnv, "CartPole-v1")
    if whose == "original":
        return ParallelEnv(NUM_ENVS, make)
    from stepmill.frontends.torchrl import ParallelEnv as OurParallelEnv

    return OurParallelEnv(NUM_ENVS, make, backend="process")


def net(num_outputs: int) -> nn.Sequential:
    """Return a network of two layers."""
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def train(whose: str, num_iterations: int) -> dict[str, Any]:
    """Train, and return what the program prints."""
    began = time.monotonic()
    set_gym_backend("gymnasium").set()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    envs = TransformedEnv(make_envs(whose), RewardSum())
    envs.set_seed(0)
    logits = TensorDictModule(net(2), ["observation"], ["logits"])
    actor = ProbabilisticActor(logits, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    critic = ValueOperator(net(1), ["observation"])
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    advantage = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    num_rows = NUM_ENVS * NUM_STEPS
    curve: list[float] = []
    collector = Collector(envs, actor, frames_per_batch=num_rows, total_frames=num_rows * num_iterations)
    for batch in collector:
        returns = batch["next", "episode_reward"][batch["next", "done"]]
        curve.append(float(returns.mean()) if len(returns) else float("nan"))
        with torch.no_grad():
            advantage(batch)
        rows = batch.reshape(-1)
        for _ in range(NUM_EPOCHS):
            for part in torch.randperm(num_rows).split(BATCH_SIZE):
                losses = loss_module(rows[part])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
    collector.shutdown()
    assert curve[-1] > LEARNED, f"the mean returns are {curve}"
    weights = b"".join(value.detach().numpy().tobytes() for value in loss_module.parameters())
    return {
        "what": f"PPO on CartPole-v1, {NUM_ENVS} envs in processes, by TorchRL's collector and loss",
        "steps": num_rows * num_iterations,
        "reward": f"{curve[-1]:.1f}",
        "seconds": round(time.monotonic() - began),
        "curve": curve,
        "weights": hashlib.sha256(weights).hexdigest()[:16],
    }


if __name__ == "__main__":
    print(json.dumps(train(sys.argv[1], int(sys.argv[2]))))
