"""Learns CartPole by PPO in one file that is laid out as CleanRL's `ppo.py`, to be compared with it.

    python examples/cleanrl_ppo.py [--total-timesteps 500000] [--seed 1] [--curve FILE.csv]

The hyperparameters and the order of the parts are CleanRL's. `stepmill.VectorEnv` makes the envs, in the mode that CleanRL's loop
expects, and counts returns. The learning rate falls to 0 over the training, whatever its length, and a shorter one ends at a lower
return. The program ends with an assertion: the policy has improved.
"""

from __future__ import annotations

import argparse
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical

import stepmill


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--env-id", default="CartPole-v1")
    add("--seed", type=int, default=1)
    add("--total-timesteps", type=int, default=500_000)
    add("--learning-rate", type=float, default=2.5e-4)
    add("--num-envs", type=int, default=4)
    add("--num-steps", type=int, default=128, help="steps of each env in a rollout")
    add("--gamma", type=float, default=0.99)
    add("--gae-lambda", type=float, default=0.95)
    add("--num-minibatches", type=int, default=4)
    add("--update-epochs", type=int, default=4)
    add("--clip-coef", type=float, default=0.2)
    add("--ent-coef", type=float, default=0.01)
    add("--vf-coef", type=float, default=0.5)
    add("--max-grad-norm", type=float, default=0.5)
    add("--backend", default="auto", help="where stepmill runs the envs")
    add("--curve", help="write env-steps and mean returns to this CSV file")
    args = parser.parse_args()
    args.batch_size = args.num_envs * args.num_steps
    args.minibatch_size = args.batch_size // args.num_minibatches
    args.num_iterations = max(args.total_timesteps // args.batch_size, 1)
    return args


def layer_init(layer: nn.Linear, std: float = np.sqrt(2)) -> nn.Linear:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, envs: stepmill.VectorEnv) -> None:
        super().__init__()
        size = int(np.prod(envs.single_observation_space.shape or ()))
        self.critic = self._network(size, 1, 1.0)
        self.actor = self._network(size, int(envs.single_action_space.n), 0.01)  # type: ignore[attr-defined]

    @staticmethod
    def _network(size: int, outputs: int, last_std: float) -> nn.Sequential:
        hidden = layer_init(nn.Linear(size, 64)), nn.Tanh(), layer_init(nn.Linear(64, 64)), nn.Tanh()
        return nn.Sequential(*hidden, layer_init(nn.Linear(64, outputs), last_std))

    def get_value(self, x: Any) -> Any:
        return self.critic(x).squeeze(-1)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[Any, ...]:
        probs = Categorical(logits=self.actor(x))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.get_value(x)


if __name__ == "__main__":
    args = parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    shuffler = np.random.default_rng(args.seed)

    # env setup
    env_fns = [lambda: gym.make(args.env_id)] * args.num_envs
    envs = stepmill.VectorEnv(env_fns, autoreset_mode="SameStep", episode_stats=True, backend=args.backend)
    agent = Agent(envs)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # storage
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros(shape + envs.single_observation_space.shape)  # type: ignore[operator]
    actions = torch.zeros(shape, dtype=torch.int64)
    logprobs, rewards, dones, values = (torch.zeros(shape) for _ in range(4))

    # start
    global_step, returns, curve = 0, [], []
    next_obs, next_done = torch.from_numpy(envs.reset(seed=args.seed)[0]), torch.zeros(args.num_envs)

    for iteration in range(args.num_iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / args.num_iterations)

        # rollout
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
            next_array, reward, terminated, truncated, infos = envs.step(actions[step].numpy())
            next_obs, next_done = torch.from_numpy(next_array), torch.from_numpy(terminated | truncated).float()
            rewards[step] = torch.from_numpy(reward)
            if "episode" in infos:
                returns += infos["episode"]["r"][infos["_episode"]].tolist()
        curve.append((global_step, np.mean(returns[-20:]) if returns else np.nan))

        # advantages
        with torch.no_grad():
            advantages, later = torch.zeros(shape), torch.zeros(args.num_envs)
            later_values, nonterminal = agent.get_value(next_obs), 1 - next_done
            for t in reversed(range(args.num_steps)):
                delta = rewards[t] + args.gamma * later_values * nonterminal - values[t]
                advantages[t] = later = delta + args.gamma * args.gae_lambda * nonterminal * later
                later_values, nonterminal = values[t], 1 - dones[t]
            b_returns = (advantages + values).flatten()

        # update
        b_obs, b_actions, b_logprobs, b_advantages, b_values = (
            tensor.flatten(0, 1) for tensor in (obs, actions, logprobs, advantages, values)
        )
        for _ in range(args.update_epochs):
            for mb in torch.from_numpy(shuffler.permutation(args.batch_size)).split(args.minibatch_size):
                _, newlogprob, entropy, newvalue = agent.get_action_and_value(b_obs[mb], b_actions[mb])
                ratio = (newlogprob - b_logprobs[mb]).exp()
                adv = (b_advantages[mb] - b_advantages[mb].mean()) / (b_advantages[mb].std() + 1e-8)
                pg_loss = -torch.min(adv * ratio, adv * ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)).mean()
                v_clipped = b_values[mb] + (newvalue - b_values[mb]).clamp(-args.clip_coef, args.clip_coef)
                v_losses = (newvalue - b_returns[mb]) ** 2, (v_clipped - b_returns[mb]) ** 2
                v_loss = 0.5 * torch.max(*v_losses).mean()
                loss = pg_loss - args.ent_coef * entropy.mean() + args.vf_coef * v_loss
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(agent.parameters(), args.max_grad_norm)
                optimizer.step()

    envs.close()
    if args.curve:
        rows = np.array(curve)
        np.savetxt(args.curve, rows, "%.6g", ",", header="env-steps,mean return of 20 episodes", comments="")
    first, last = np.mean(returns[:20]), np.mean(returns[-20:])
    print(f"mean return {first:.0f} at the start, {last:.0f} after {global_step} env-steps")
    assert last > (5 * first if args.total_timesteps >= 100_000 else first)
