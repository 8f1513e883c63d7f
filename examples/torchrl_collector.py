"""TorchRL's PPO on CartPole: its collector, its loss, its modules; stepmill runs the envs.

    python examples/torchrl_collector.py [--frames 40000] [--seed 1] [--curve FILE.csv]

`StepmillEnv` replaces `ParallelEnv(16, lambda: GymEnv("CartPole-v1"))`; all other parts are TorchRL's. Episodes
are counted in the collector's batches. The program ends with assertions: all frames arrived, and the episodes got longer.
"""

from __future__ import annotations

import argparse

import gymnasium
import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.collectors import Collector
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from stepmill.frontends.torchrl import StepmillEnv

NUM_ENVS, FRAMES, EPOCHS, MINIBATCH = 16, 2048, 6, 256


def trunk(num_outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, num_outputs))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=20 * FRAMES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write frames and steps per episode to this CSV file")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    env = StepmillEnv(
        [lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, num_workers=2, categorical_action_encoding=True
    )
    env.set_seed(args.seed)
    actor = ProbabilisticActor(
        TensorDictModule(trunk(2), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    critic = ValueOperator(trunk(1), in_keys=["observation"])
    loss_module = ClipPPOLoss(actor, critic, entropy_coeff=0.01)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss_module.parameters(), lr=1e-3)
    collector = Collector(env, actor, frames_per_batch=FRAMES, total_frames=args.frames)
    num_frames, lengths = 0, []
    for batch in collector:  # [NUM_ENVS, FRAMES / NUM_ENVS]
        num_frames += batch.numel()
        lengths.append(batch.numel() / max(1, int(batch["next", "done"].sum())))  # steps per episode
        for _ in range(EPOCHS):
            with torch.no_grad():
                gae(batch)
            rows = batch.reshape(-1)
            for chosen in torch.randperm(len(rows)).split(MINIBATCH):
                losses = loss_module(rows[chosen])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(loss_module.parameters(), 0.5)
                optimizer.step()
        collector.update_policy_weights_()
    collector.shutdown()  # closes the env, too
    print(f"{num_frames} frames; {lengths[0]:.0f} steps per episode at the start, {lengths[-1]:.0f} at the end")
    if args.curve:
        rows = [(FRAMES * number, length) for number, length in enumerate(lengths, 1)]
        np.savetxt(args.curve, rows, "%.6g", ",", header="env-steps,steps per episode", comments="")
    assert num_frames >= args.frames
    assert lengths[-1] > (4 * lengths[0] if args.frames >= 40_000 else 0)


if __name__ == "__main__":
    main()
