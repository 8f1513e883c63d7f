"""Environments in ALF's shape, without ALF: specs, TimeSteps as named tuples, a `step` that resets by itself."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from stepmill.envs.alf_batch import map_nest, stack
from stepmill.testing.gates import wait_at

FIRST, MID, LAST = np.int32(0), np.int32(1), np.int32(2)
ONE, ZERO = np.float32(1), np.float32(0)


class TimeStep(NamedTuple):
    step_type: Any = ()
    reward: Any = ()
    discount: Any = ()
    observation: Any = ()
    prev_action: Any = ()
    env_id: Any = ()
    untransformed: Any = ()
    env_info: Any = ()

    def is_last(self) -> Any:
        return self.step_type == LAST


class Pose(NamedTuple):
    place: Any
    speed: Any


@dataclass(frozen=True)
class Spec:
    """What TensorSpec is to ALF."""

    shape: tuple[int, ...] = ()
    dtype: str = "torch.float32"
    maximum: float | None = None


def full_spec(observation: Any, action: Any, reward: Spec) -> TimeStep:
    return TimeStep(Spec((), "int32"), reward, Spec(), observation, action, Spec((), "int32"))


def zeros(spec: Any) -> Any:
    return map_nest(lambda leaf: np.zeros(leaf.shape, leaf.dtype.rpartition(".")[2])[()], spec)


def actions(num: int, value: float = 1.0) -> Any:
    return np.full(num, value, np.float32)


class AlfCounter:
    """Counts: observation [4] float32 = (env_id it was made with, episodes, t, action), reward t, episodes of `length`.

    `discount` is that of the last step: 0 is a termination, more a time limit. The base of the others.
    """

    metadata = {"render_modes": ["rgb_array"], "about": "counter"}
    task_names = ["count", "more"]
    num_tasks = 2
    is_tensor_based = False
    action = Spec()
    observation: Any = Spec((4,))
    reward = Spec()
    info: Any = {}

    def __init__(
        self, env_id: int | None = 0, *, length: int = 3, discount: float = 0.0, folder: Path | None = None
    ) -> None:
        self.made_with = 0 if env_id is None else env_id
        self.length = length
        self.last_discount = np.float32(discount)
        self.folder = folder
        self.episodes = self.t = 0
        self.is_over = True
        self.progress: dict[str, float] = {}
        self.rng = np.random.RandomState(42)
        self.count("made")

    def action_spec(self) -> Any:
        return self.action

    def observation_spec(self) -> Any:
        return self.observation

    def reward_spec(self) -> Any:
        return self.reward

    def env_info_spec(self) -> Any:
        return self.info

    def time_step_spec(self) -> Any:
        return full_spec(self.observation, self.action, self.reward)

    def reset(self) -> Any:
        self.count("resets")
        self.episodes += 1
        self.t = 0
        self.is_over = False
        return self.tell(FIRST, ZERO, ONE, zeros(self.action))

    def step(self, action: Any) -> Any:
        if self.is_over:
            return self.reset()
        self.t += 1
        self.is_over = self.t >= self.length
        step_type = LAST if self.is_over else MID
        return self.tell(step_type, np.float32(self.t), self.last_discount if self.is_over else ONE, action)

    def tell(self, step_type: Any, reward: Any, discount: Any, action: Any) -> Any:
        info = self.tell_info()
        return TimeStep(
            step_type, reward, discount, self.observe(action), action, np.int32(self.made_with), env_info=info
        )

    def tell_info(self) -> Any:
        return {}

    def observe(self, action: Any) -> Any:
        return np.array([self.made_with, self.episodes, self.t, action], np.float32)

    def seed(self, seed: int) -> int:
        self.rng.seed(seed)
        return seed * 10

    def draw(self) -> float:
        return float(self.rng.uniform())

    def render(self, mode: str) -> Any:
        return np.full((2, 2, 3), self.made_with, np.uint8), mode

    def update_all_progresses(self, progress: dict[str, float]) -> None:
        self.progress = dict(progress)

    def whoami(self, *args: Any, **kwargs: Any) -> Any:
        return self.made_with, os.getpid(), args, kwargs

    def complain(self) -> None:
        raise LookupError("nothing is right")

    def close(self) -> None:
        self.count("closed")

    def count(self, name: str) -> None:
        if self.folder is not None:
            with open(self.folder / name, "ab") as file:
                file.write(b".")


class NestedAlf(AlfCounter):
    """Nests of every kind, dtypes of every kind, a vector reward, an env_info."""

    action = {"move": Spec((2,)), "jump": (Spec((), "int64"), [Spec((1,), "int32")])}
    observation = {
        "pose": Pose(Spec((2,), "float64"), Spec()),
        "parts": [Spec((2, 2), "uint8"), (Spec((), "int64"), {"flag": Spec((), "bool")})],
        "empty": (),
    }
    reward = Spec((2,))
    info = {"distance": Spec((), "float32"), "deep": (Spec((3,), "int16"),)}

    def observe(self, action: Any) -> Any:
        t = self.t
        # A list, a strided array, an array of another byte order: as envs have them.
        return {
            "pose": Pose(np.arange(4.0)[::2] * t, np.float32(t)),
            "parts": [np.full((2, 2), t, np.uint8), (np.int64(t), {"flag": np.bool_(t % 2)})],
            "empty": (),
        }

    def tell(self, step_type: Any, reward: Any, discount: Any, action: Any) -> Any:
        return super().tell(step_type, np.array([reward, -reward], np.float32), discount, action)

    def tell_info(self) -> Any:
        return {"distance": np.float32(self.t), "deep": (np.arange(3, dtype=">i2") * self.t,)}


class RandomAlf(AlfCounter):
    """Draws its observations and its ends; `seed` decides them."""

    observation = Spec((3, 3))
    action = Spec((7,))

    def observe(self, action: Any) -> Any:
        return self.rng.uniform(size=(3, 3)).astype(np.float32)

    def step(self, action: Any) -> Any:
        if not self.is_over and self.rng.uniform() < 0.1:
            self.length = self.t + 1
        else:
            self.length = 10**6
        return super().step(action)


class ProgressAlf(AlfCounter):
    """Never ends; observes the learner's progress."""

    observation = Spec()

    def observe(self, action: Any) -> Any:
        return np.float32(self.progress.get("global_counter", -1))

    def tell_info(self) -> Any:
        return ()  # where the spec is an empty dict


class GatedAlf(AlfCounter):
    """Waits at gates: while it is made, in resets but the first `free_resets`, and when its action is 99."""

    def __init__(
        self,
        env_id: int = 0,
        *,
        make_gate: Path | None = None,
        reset_gate: Path | None = None,
        step_gate: Path | None = None,
        free_resets: int = 0,
        **arguments: Any,
    ) -> None:
        if make_gate is not None:
            wait_at(make_gate)
        self.reset_gate, self.step_gate, self.free_resets = reset_gate, step_gate, free_resets
        super().__init__(env_id, **arguments)

    def reset(self) -> Any:
        self.free_resets -= 1
        if self.reset_gate is not None and self.free_resets < 0:
            wait_at(self.reset_gate)
        return super().reset()

    def step(self, action: Any) -> Any:
        if self.step_gate is not None and action == 99:
            wait_at(self.step_gate)
        return super().step(action)

    def meet(self, path: Path, *, key: str) -> tuple[int, str]:
        wait_at(path)
        return self.made_with, key


class FaultyAlf(AlfCounter):
    """Fails in "init", "reset" or at action 13 of "step": raises, ends its process, or returns an invalid value."""

    def __init__(self, env_id: int = 0, *, phase: str = "step", how: str = "raise", only: int | None = None) -> None:
        self.phase = phase if only in (None, env_id) else "never"
        self.how = how
        if self.phase == "init":
            self.fail()
        super().__init__(env_id)

    def fail(self) -> None:
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"failed in {self.phase}")

    def reset(self) -> Any:
        if self.phase == "reset":
            self.fail()
        return super().reset()

    def step(self, action: Any) -> Any:
        time_step = super().step(action)
        if self.phase != "step" or action != 13:
            return time_step
        if self.how == "shape":
            return time_step._replace(observation=np.zeros(5, np.float32))
        if self.how == "dtype":
            return time_step._replace(step_type=np.float32(1.5))
        if self.how == "structure":
            return time_step._replace(observation={"a": time_step.observation})
        if self.how == "text":
            return time_step._replace(observation=np.array(list("abcd")))
        if self.how == "short":
            return tuple(time_step)[:3]
        if self.how == "none":
            return None
        self.fail()
        return None


class Reference:
    """What a parallel environment has to return: its envs stepped here, one after the other, stacked, slots as ids."""

    def __init__(self, constructors: list[Callable[..., Any]]) -> None:
        self.envs = [constructor(env_id=i) for i, constructor in enumerate(constructors)]

    def seed(self, seeds: list[int]) -> list[int]:
        return [env.seed(seed) for env, seed in zip(self.envs, seeds, strict=True)]

    def reset(self) -> Any:
        return self._stacked([env.reset() for env in self.envs])

    def step(self, action: Any) -> Any:
        return self._stacked([env.step(map_nest(lambda x, i=i: x[i], action)) for i, env in enumerate(self.envs)])

    def _stacked(self, time_steps: list[Any]) -> Any:
        return stack(time_steps)._replace(env_id=np.arange(len(time_steps), dtype=np.int32))


def assert_same(one: Any, other: Any, path: str = "") -> None:
    """Fail unless two nests are of the same types, keys, dtypes, shapes and values."""
    if isinstance(other, dict):
        assert list(one) == list(other), path
        for key in other:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(other, (tuple, list)):
        assert type(one).__name__ == type(other).__name__, path
        assert len(one) == len(other), path
        for index, (left, right) in enumerate(zip(one, other, strict=True)):
            assert_same(left, right, f"{path}[{index}]")
    else:
        left, right = np.asarray(one), np.asarray(other)
        assert left.dtype == right.dtype.newbyteorder("="), (path, left.dtype, right.dtype)
        assert left.shape == right.shape, path
        assert (left == right).all(), (path, left, right)
