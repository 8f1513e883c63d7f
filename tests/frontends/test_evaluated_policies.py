"""`stepmill.evaluate` with policies of torch and Stable-Baselines3, as they are."""

from __future__ import annotations

import gymnasium
import numpy as np
import pytest

import stepmill

torch = pytest.importorskip("torch")


def play(act, seed, env_id="CartPole-v1"):
    """Return the return of one episode that is played by hand."""
    env = gymnasium.make(env_id)
    obs, _ = env.reset(seed=seed)
    total, is_over = 0.0, False
    while not is_over:
        obs, reward, terminated, truncated, _ = env.step(act(obs))
        total, is_over = total + reward, terminated or truncated
    return total


def test_a_torch_module_may_return_logits():
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.9), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    module.train()
    found = stepmill.evaluate(module, "CartPole-v1", seeds=range(6), num_envs=6, batch_size=6)
    assert module.training
    module.eval()

    def act(obs):
        with torch.inference_mode():
            return int(module(torch.as_tensor(obs)[None]).argmax())

    assert [each.episode_return for each in found.episodes] == [play(act, seed) for seed in range(6)]


@pytest.mark.parametrize("width", [1, 5])
def test_logits_of_another_number_of_actions_are_refused(width):
    with pytest.raises(stepmill.UsageError, match=rf"shape \(., {width}\)"):
        stepmill.evaluate(torch.nn.Linear(4, width), "CartPole-v1", seeds=range(2), num_envs=2, backend="serial")


def test_a_torch_module_gets_its_own_dtype_and_returns_actions():
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)

        def forward(self, obs):
            assert obs.dtype == torch.float64
            return 0 * self.layer(obs)

    found = stepmill.evaluate(Half(), "Pendulum-v1", seeds=range(2), num_envs=2)
    expected = [play(lambda _obs: np.zeros(1, np.float32), seed, "Pendulum-v1") for seed in range(2)]
    assert [each.episode_return for each in found.episodes] == pytest.approx(expected)


def test_a_model_of_stable_baselines3_acts_deterministically():
    sb3 = pytest.importorskip("stable_baselines3")
    model = sb3.PPO("MlpPolicy", gymnasium.make("CartPole-v1"), n_steps=64, batch_size=64, seed=1, device="cpu").learn(
        256
    )
    found = stepmill.evaluate(model, "CartPole-v1", seeds=range(8), num_envs=4)
    expected = [play(lambda obs: int(model.predict(obs, deterministic=True)[0]), seed) for seed in range(8)]
    assert [each.episode_return for each in found.episodes] == expected
