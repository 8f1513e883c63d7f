"""Trains a policy for an Atari game by PPO in one file laid out as CleanRL's `ppo_atari.py`, to be compared with it.

    python examples/cleanrl_ppo_atari.py [--env-id ALE/Pong-v5] [--total-timesteps 10000000] [--cuda]

Hyperparameters and the order of the parts are CleanRL's. The envs are made by `stepmill.VectorEnv`: of Pong, with sticky actions, by
default. Losing a life does not end an episode. Only 260,000 env-steps of training were tried. At the end the loss is asserted finite.
"""

from __future__ import annotations

import argparse
from typing import Any

import ale_py
import gymnasium as gym
import numpy as np
import torch
from torch import nn, optim
from torch.distributions import Categorical

import stepmill


def parse_args() -> argparse.Namespace:
    add = (parser := argparse.ArgumentParser()).add_argument
    add("--env-id", default="ALE/Pong-v5")
    add("--seed", type=int, default=1)
    add("--total-timesteps", type=int, default=10_000_000)
    add("--learning-rate", type=float, default=2.5e-4)
    add("--num-envs", type=int, default=8)
    add("--num-steps", type=int, default=128, help="steps of each env in a rollout")
    add("--gamma", type=float, default=0.99)
    add("--gae-lambda", type=float, default=0.95)
    add("--num-minibatches", type=int, default=4)
    add("--update-epochs", type=int, default=4)
    add("--clip-coef", type=float, default=0.1)
    add("--ent-coef", type=float, default=0.01)
    add("--vf-coef", type=float, default=0.5)
    add("--max-grad-norm", type=float, default=0.5)
    add("--cuda", action="store_true")
    return parser.parse_args()


def make_env(env_id: str) -> gym.Env[Any, Any]:
    gym.register_envs(ale_py)
    env = gym.wrappers.RecordEpisodeStatistics(gym.make(env_id, frameskip=1))
    env = gym.wrappers.AtariPreprocessing(env)
    env = gym.wrappers.TransformReward(env, np.sign)
    return gym.wrappers.FrameStackObservation(env, 4)


def layer_init(layer: Any, std: float = np.sqrt(2)) -> Any:
    nn.init.orthogonal_(layer.weight, std)
    nn.init.zeros_(layer.bias)
    return layer


class Agent(nn.Module):
    def __init__(self, envs: stepmill.VectorEnv) -> None:
        super().__init__()
        self.network = nn.Sequential(
            layer_init(nn.Conv2d(4, 32, 8, 4)), nn.ReLU(), layer_init(nn.Conv2d(32, 64, 4, 2)), nn.ReLU(),
            layer_init(nn.Conv2d(64, 64, 3, 1)), nn.ReLU(), nn.Flatten(), layer_init(nn.Linear(64 * 7 * 7, 512)), nn.ReLU(),
        )  # fmt: skip
        self.actor = layer_init(nn.Linear(512, int(envs.single_action_space.n)), 0.01)  # type: ignore[attr-defined]
        self.critic = layer_init(nn.Linear(512, 1), 1.0)

    def get_value(self, x: Any) -> Any:
        return self.critic(self.network(x / 255.0)).squeeze(-1)

    def get_action_and_value(self, x: torch.Tensor, action: torch.Tensor | None = None) -> tuple[Any, ...]:
        hidden = self.network(x / 255.0)
        probs = Categorical(logits=self.actor(hidden))
        action = probs.sample() if action is None else action
        return action, probs.log_prob(action), probs.entropy(), self.critic(hidden).squeeze(-1)


if __name__ == "__main__":
    args = parse_args()
    args.batch_size = args.num_envs * args.num_steps
    args.num_iterations = max(args.total_timesteps // args.batch_size, 1)
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if args.cuda else "cpu")
    shuffler = np.random.default_rng(args.seed)

    # env setup
    envs = stepmill.VectorEnv([lambda: make_env(args.env_id)] * args.num_envs, autoreset_mode="SameStep")
    agent = Agent(envs).to(device)
    optimizer = optim.Adam(agent.parameters(), lr=args.learning_rate, eps=1e-5)

    # storage, start
    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, 4, 84, 84), dtype=torch.uint8, device=device)
    actions = torch.zeros(shape, dtype=torch.int64, device=device)
    logprobs, rewards, dones, values = (torch.zeros(shape, device=device) for _ in range(4))
    global_step, returns = 0, []
    next_obs = torch.from_numpy(envs.reset(seed=args.seed)[0]).to(device)
    next_done = torch.zeros(args.num_envs, device=device)

    for iteration in range(args.num_iterations):
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1 - iteration / args.num_iterations)

        # rollout
        for step in range(args.num_steps):
            global_step += args.num_envs
            obs[step], dones[step] = next_obs, next_done
            with torch.no_grad():
                actions[step], logprobs[step], _, values[step] = agent.get_action_and_value(next_obs)
            next_array, reward, terminated, truncated, infos = envs.step(actions[step].cpu().numpy())
            next_obs = torch.from_numpy(next_array).to(device)
            next_done = torch.from_numpy(terminated | truncated).float().to(device)
            rewards[step] = torch.from_numpy(reward)
            if "final_info" in infos:
                returns += infos["final_info"]["episode"]["r"][infos["_final_info"]].tolist()

        # advantages
        with torch.no_grad():
            advantages, later = torch.zeros_like(rewards), torch.zeros_like(next_done)
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
            for mb in torch.from_numpy(shuffler.permutation(args.batch_size)).split(
                args.batch_size // args.num_minibatches
            ):
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

        print(f"{global_step} steps, mean return {np.mean(returns[-20:]) if returns else np.nan:.1f}, loss {loss:.3f}")

    envs.close()
    assert torch.isfinite(loss)
