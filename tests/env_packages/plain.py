"""Envs of APIs that Gymnasium cannot host, played without stepmill: as one batch of a Pool with `autoreset_mode` NEXT_STEP."""

import copy
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Result = tuple[Any, Any, Any, Any]  # observation, reward, terminated, truncated


class Plain:
    """One env, which is reset by the step after the end of an episode."""

    is_seeded = True

    def __init__(self, env: Any) -> None:
        self.env = env
        self.is_over = False

    def reset(self, seed: int | None) -> Result:
        """Begin an episode."""
        raise NotImplementedError

    def advance(self, action: Any) -> Result:
        """Step the env."""
        raise NotImplementedError

    def draw(self, rng: np.random.Generator) -> Any:
        """Return a random action."""
        raise NotImplementedError

    def step(self, action: Any) -> Result:
        """Step the env, or reset it if its episode is over."""
        if self.is_over:
            self.is_over = False
            return self.reset(None)
        result = self.advance(action)
        self.is_over = bool(np.all(np.logical_or(result[2], result[3])))
        return result


class DmEnv(Plain):
    """dm_control: the generator of the task has the seed, and discount 0 ends an episode by itself."""

    def reset(self, seed: int | None) -> Result:
        if seed is not None:
            self.env.task.random.seed(seed)
        return self.env.reset().observation, 0.0, False, False

    def advance(self, action: Any) -> Result:
        time_step = self.env.step(action)
        is_last = time_step.last()
        return (
            time_step.observation,
            time_step.reward,
            is_last and not time_step.discount,
            is_last and bool(time_step.discount),
        )

    def draw(self, rng: np.random.Generator) -> Any:
        spec = self.env.action_spec()
        return rng.uniform(spec.minimum, spec.maximum, spec.shape).astype(spec.dtype)


class Parallel(Plain):
    """PettingZoo: zeros in the place of absent agents, and an action for those in `env.agents` only."""

    def reset(self, seed: int | None) -> Result:
        obs, _ = self.env.reset(seed=seed)
        none = np.zeros(len(self.env.possible_agents))
        return self._fill(obs), none, none.astype(bool), none.astype(bool)

    def advance(self, action: Any) -> Result:
        obs, *values, _ = self.env.step({agent: action[agent] for agent in self.env.agents})
        rows = [[values_of.get(agent, 0) for agent in self.env.possible_agents] for values_of in values]
        return self._fill(obs), np.array(rows[0], float), np.array(rows[1], bool), np.array(rows[2], bool)

    def step(self, action: Any) -> Result:
        result = super().step(action)
        self.is_over = not self.env.agents
        return result

    def draw(self, rng: np.random.Generator) -> Any:
        actions = {}
        for agent in self.env.possible_agents:
            space = self.env.action_space(agent)
            space.seed(int(rng.integers(2**31)))
            actions[agent] = space.sample()
        return actions

    def _fill(self, obs: Mapping[str, Any]) -> Any:
        spaces = {agent: self.env.observation_space(agent) for agent in self.env.possible_agents}
        return {agent: obs.get(agent, np.zeros(space.shape, space.dtype)) for agent, space in spaces.items()}


class TextArena(Plain):
    """textarena: a copy of the env for each game, since wrappers keep the texts of the game before."""

    texts = ("[up]", "[left]", "[right]", "[down]")

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self._unplayed = env

    def reset(self, seed: int | None) -> Result:
        self.env = copy.deepcopy(self._unplayed)
        self.env.reset(num_players=1, seed=seed)
        return self.env.get_observation()[1], 0.0, False, False

    def advance(self, action: Any) -> Result:
        is_over, _ = self.env.step(action=action)
        if is_over:
            return "", float(self.env.close()[0][0]), True, False
        return self.env.get_observation()[1], 0.0, False, False

    def draw(self, rng: np.random.Generator) -> Any:
        return str(rng.choice(self.texts))


class Guesses(TextArena):
    """GuessTheNumber."""

    texts = tuple(f"[{number}]" for number in range(1, 21))


class OldGym(Plain):
    """Crafter: four values, and no seed of a reset."""

    is_seeded = False

    def reset(self, seed: int | None) -> Result:
        return self.env.reset(), 0.0, False, False

    def advance(self, action: Any) -> Result:
        obs, reward, is_over, _ = self.env.step(action)
        return obs, float(reward), bool(is_over), False

    def draw(self, rng: np.random.Generator) -> Any:
        return int(rng.integers(self.env.action_space.n))


def play(api: type[Plain], make: Callable[[], Any], actions: list[list[Any]]) -> list[Result]:
    """Play each env alone, one after the other, and return the batches; env i has the seed i and the actions `actions[i]`."""
    rows = []
    for seed, actions_of_env in enumerate(actions):
        random.seed(seed)
        plain = api(make())
        rows.append([plain.reset(seed), *(plain.step(action) for action in actions_of_env)])
    return [stack(list(results)) for results in zip(*rows, strict=True)]


def stack(values: list[Any]) -> Any:
    """Return values of all envs as one batch: arrays [N, ...] in the structure of the values, and tuples of texts."""
    if isinstance(values[0], Mapping):
        return {key: stack([value[key] for value in values]) for key in values[0]}
    if isinstance(values[0], tuple):
        return tuple(stack(list(parts)) for parts in zip(*values, strict=True))
    return tuple(values) if isinstance(values[0], str) else np.stack([np.asarray(value) for value in values])
