"""Programs that run with TorchRL's classes or with ours: envs of one side, which are closed; TorchRL's Gymnasium."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

import torchrl.envs  # noqa: E402 - only if TorchRL is there
from tensordict import TensorDict  # noqa: E402
from torchrl.data import Composite, Unbounded  # noqa: E402
from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv, set_gym_backend  # noqa: E402

from stepmill.frontends import torchrl as frontend  # noqa: E402
from tests.originals import either  # noqa: E402
from tests.originals.torchrl.test_torchrl_programs import CHECKOUT  # noqa: E402

MARKS = [
    pytest.mark.filterwarnings("ignore"),  # TorchRL's
    pytest.mark.skipif(not CHECKOUT.is_dir(), reason="needs TorchRL's checkout; make test-originals has it"),
]


class Maker(either.Maker):
    """Makes envs of one side, and closes them."""

    def __init__(self, whose: str) -> None:
        super().__init__(whose)
        self.module = frontend if self.is_ours else torchrl.envs

    def here(self, fns: Any, **keywords: Any) -> Any:
        """Return envs in this process: TorchRL's SerialEnv, which takes ParallelEnv's arguments, or ours."""
        fns = fns if isinstance(fns, list) else [fns] * 2
        cls = partial(frontend.ParallelEnv, backend="serial") if self.is_ours else SerialEnv
        return self.keep(cls(len(fns), fns, **keywords))

    def parallel(self, fn: Callable[[], Any], **keywords: Any) -> Any:
        """Return two envs in forked processes."""
        return self.keep(self.module.ParallelEnv(2, fn, **{"mp_start_method": "fork", **keywords}))

    def threaded(self, *args: Any, **keywords: Any) -> Any:
        """Return EnvPool's envs."""
        return self.keep(self.module.MultiThreadedEnv(*args, **keywords))

    def asynchronous(self, count: int = 2) -> Any:
        """Return envs that are stepped asynchronously."""
        if self.is_ours:
            return self.keep(frontend.AsyncStepmillEnv([cartpole] * count, backend="thread"))
        return self.keep(torchrl.envs.AsyncEnvPool([cartpole] * count, backend="threading"))

    def close(self) -> None:
        """Close the envs. The original's raise if they are closed, or a worker is gone."""
        for env in self.made:
            with contextlib.nullcontext() if self.is_ours else contextlib.suppress(Exception):
                env.close(raise_if_closed=False)


def use_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let TorchRL use Gymnasium, also where it asks for gym by name: in MultiThreadedEnv."""
    monkeypatch.setitem(sys.modules, "gym", gymnasium)
    set_gym_backend("gymnasium").set()


def cartpole() -> Any:
    return GymEnv("CartPole-v1")


def counted(max_steps: int = 2) -> Any:
    """Return an env whose episodes end after some steps at the latest."""
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(max_steps=max_steps))


class Plain(gymnasium.Env):  # type: ignore[type-arg]
    """An env whose spaces are given. Its observations are samples, its rewards the actions' sums."""

    def __init__(self, observation: Any = None, action: Any = None) -> None:
        self.observation_space = observation or gymnasium.spaces.Box(-1, 1, (2,))
        self.action_space = action or gymnasium.spaces.Discrete(2)
        self.seen: list[Any] = []

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self.observation_space.seed(0)
        self.seen.append(seed)
        return self.observation_space.sample(), {"lives": np.int64(3)}

    def step(self, action: Any) -> Any:
        self.seen.append(action)
        return self.observation_space.sample(), 0.1, False, False, {"lives": np.int64(2)}


class Sleeps(Plain):
    """Never returns from a step."""

    def step(self, action: Any) -> Any:
        signal.pause()


class NoTruncation(torchrl.envs.EnvBase):  # type: ignore[misc]
    """An env of TorchRL without a truncated flag."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec = Composite(observation=Unbounded((2,)))
        self.action_spec = Unbounded((1,))
        self.reward_spec = Unbounded((1,), dtype=torch.float64)

    def _reset(self, tensordict: Any = None, **keywords: Any) -> Any:
        return TensorDict({"observation": torch.zeros(2), "done": torch.zeros(1, dtype=torch.bool)}, [])

    def _step(self, tensordict: Any) -> Any:
        reward = torch.ones(1, dtype=torch.float64)
        return TensorDict(
            {"observation": torch.ones(2), "reward": reward, "done": torch.zeros(1, dtype=torch.bool)}, []
        )

    def _set_seed(self, seed: Any) -> None: ...


def of(env_fn: Callable[[], Any], make: Maker, **keywords: Any) -> Callable[[], Any]:
    """Return a function that makes an env for the side: TorchRL's needs a wrapper."""
    return env_fn if make.is_ours else partial(wrap, env_fn, keywords)


def wrap(env_fn: Callable[[], Any], keywords: Any) -> Any:
    """Return an env in TorchRL's wrapper. (TorchRL steps what a lambda makes in this process.)"""
    return torchrl.envs.GymWrapper(env_fn(), **keywords)


def act(env: Any, tensordict: Any) -> Any:
    """Step envs with random actions."""
    return env.step(env.rand_action(tensordict))["next"]


def scaled() -> Any:
    """Return an env that has a state."""
    return TransformedEnv(GymEnv("CartPole-v1"), torchrl.envs.RewardScaling(0.0, 1.0))


def filled(state: Any, value: float) -> Any:
    """Return a state whose tensors have one value."""
    if isinstance(state, torch.Tensor):
        return torch.full_like(state, value)
    return {key: filled(part, value) for key, part in state.items()}


class Fails(Plain):
    """Dies, or raises, in its first step."""

    def __init__(self, *, dies: bool) -> None:
        super().__init__()
        self.dies = dies

    def step(self, action: Any) -> Any:
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise KeyError("on purpose")
