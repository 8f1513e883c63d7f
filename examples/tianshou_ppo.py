"""Tianshou's PPO on CartPole: its collector, its buffer, its networks; stepmill runs the envs.

    python examples/tianshou_ppo.py [--steps 40000] [--seed 1] [--curve FILE.csv]

`StepmillVectorEnv` replaces Tianshou's `SubprocVectorEnv`; all other parts are Tianshou's. The curve divides the steps of a batch by the
episodes that end in it, which may be more than the 500 steps of the longest episode. The program ends with assertions: the number of
steps is the wanted one, and the episodes got longer.
"""

from __future__ import annotations

import argparse
from contextlib import closing

import gymnasium
import numpy as np
import torch
from tianshou.algorithm import PPO
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.utils.net.common import Net
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from tianshou.utils.torch_utils import policy_within_training_step

from stepmill.frontends.tianshou import StepmillVectorEnv

NUM_ENVS, STEPS, EPOCHS, MINIBATCH = 16, 2048, 6, 256


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20 * STEPS)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--curve", help="write env-steps and steps per episode to this CSV file")
    args = parser.parse_args()
    np.random.seed(args.seed)  # noqa: NPY002 - Tianshou shuffles minibatches with the global generator
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    with closing(StepmillVectorEnv([lambda: gymnasium.make("CartPole-v1")] * NUM_ENVS, num_workers=2)) as envs:
        envs.seed(args.seed)
        space = envs.action_space[0]
        actor = DiscreteActor(
            preprocess_net=Net(state_shape=4, hidden_sizes=(64, 64)), action_shape=2, softmax_output=False
        )
        critic = DiscreteCritic(preprocess_net=Net(state_shape=4, hidden_sizes=(64, 64)))
        policy = ProbabilisticActorPolicy(
            actor=actor,
            dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
            action_space=space,
            action_scaling=False,
        )
        algorithm = PPO(policy=policy, critic=critic, optim=AdamOptimizerFactory(lr=1e-3))
        collector = Collector(algorithm, envs, VectorReplayBuffer(STEPS, NUM_ENVS))
        collector.reset()
        num_steps, lengths = 0, []
        while num_steps < args.steps:
            found = collector.collect(n_step=STEPS)
            num_steps += found.n_collected_steps
            lengths.append(found.n_collected_steps / max(1, found.n_collected_episodes))  # steps per episode
            with policy_within_training_step(policy):
                algorithm.update(collector.buffer, batch_size=MINIBATCH, repeat=EPOCHS)
            collector.reset_buffer(keep_statistics=True)
    print(f"steps per episode: {lengths[0]:.0f} in the first batch, {lengths[-1]:.0f} in the last")
    if args.curve:
        rows = [(STEPS * (index + 1), length) for index, length in enumerate(lengths)]
        np.savetxt(args.curve, rows, "%.6g", ",", header="env-steps,steps per episode", comments="")
    assert num_steps == STEPS * len(lengths)
    if num_steps >= 20 * STEPS:
        assert lengths[-1] > 4 * lengths[0]


if __name__ == "__main__":
    main()
