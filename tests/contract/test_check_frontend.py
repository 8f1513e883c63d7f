"""`check_frontend` is checked: it passes a sound vector env and refuses every one with a planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import stepmill
from stepmill.testing import CheckFailed, check_frontend


def roll(value: Any) -> Any:
    """Rows of a batch, each moved to its neighbour's place."""
    if isinstance(value, dict):
        return {key: roll(child) for key, child in value.items()}
    if isinstance(value, tuple) and value and isinstance(value[0], (np.ndarray, dict)):
        return tuple(roll(child) for child in value)
    return np.roll(value, 1, axis=0) if isinstance(value, np.ndarray) else (*value[1:], value[0])


def first_array(value: Any) -> Any:
    """The first array with numbers in a nest."""
    if isinstance(value, np.ndarray):
        return value if value.size and value.dtype.kind in "iuf" else None
    children = value.values() if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
    return next((found for child in children if (found := first_array(child)) is not None), None)


class Sound(SyncVectorEnv):
    """Gymnasium's own, without its one fault: it takes the mask out of the options that it is given."""

    def reset(self, *, seed=None, options=None):
        return super().reset(seed=seed, options=dict(options) if options else options)


class StaleAfterReset(Sound):
    """An env that was reset shows what it showed before."""

    last: Any = None

    def reset(self, *, seed=None, options=None):
        obs, infos = super().reset(seed=seed, options=options)
        return (obs if self.last is None else self.last), infos

    def step(self, actions):
        result = super().step(actions)
        self.last = result[0]
        return result


class StaleAfterAutoreset(Sound):
    """The observation of an automatic reset is the one before it."""

    last: Any = None

    def step(self, actions):
        is_reset = self._autoreset_envs.copy()
        obs, *rest = super().step(actions)
        shown = self.last if is_reset.any() and self.last is not None else obs
        self.last = obs
        return (shown, *rest)


class LateFinalObs(Sound):
    """The last observation is that of the next episode."""

    def step(self, actions):
        obs, *rest, infos = super().step(actions)
        if "final_obs" in infos:
            rows = list(gymnasium.vector.utils.iterate(self.observation_space, obs))
            places = np.flatnonzero(infos["_final_obs"])
            infos["final_obs"][places] = [None] * len(places)
            for place in places:
                infos["final_obs"][place] = rows[place]
        return (obs, *rest, infos)


class ActsOnNewEpisode(Sound):
    """An action for an env whose episode was over is applied to the next one, right after its reset."""

    def step(self, actions):
        over = self._autoreset_envs.copy()
        result = super().step(actions)
        if self.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP and over.any():
            return super().step(actions)
        return result


class OptionsEaten(Sound):
    """What the caller gave is changed."""

    def reset(self, *, seed=None, options=None):
        result = super().reset(seed=seed, options=dict(options) if options else options)
        if options:
            options.clear()
        return result


class ActionsChanged(Sound):
    """What the caller gave is changed."""

    def step(self, actions):
        result = super().step(actions)
        array = first_array(actions)
        array[...] = 0
        return result


class SharedObservations(Sound):
    """What was returned changes with the next step."""

    def __init__(self, env_fns, **arguments):
        super().__init__(env_fns, copy=False, **arguments)


class SharedRewards(Sound):
    kept: Any = None

    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        self.kept = reward if self.kept is None else self.kept
        self.kept[...] = reward
        return (obs, self.kept, *rest)


class FewerRows(Sound):
    """It says it has another number of envs than it was given."""

    def __init__(self, env_fns, **arguments):
        super().__init__(env_fns, **arguments)
        self.num_envs -= 1


class UnknownMode(Sound):
    """Its metadata do not say how it resets."""

    def __init__(self, env_fns, **arguments):
        super().__init__(env_fns, **arguments)
        self.metadata = {}


def without(mapping: Any, *keys: str) -> Any:
    return {key: value for key, value in mapping.items() if key not in keys} if mapping else mapping


STEP_FAULTS: dict[str, Callable[..., Any]] = {
    "wrong order": lambda obs, *rest: (roll(obs), *rest),
    "neighbour's reward": lambda obs, reward, *rest: (obs, np.roll(reward, 1), *rest),
    "narrow rewards": lambda obs, reward, *rest: (obs, reward.astype(np.float32), *rest),
    "flags swapped": lambda obs, reward, terminated, truncated, infos: (obs, reward, truncated, terminated, infos),
    "lost final obs": lambda *rest: (*rest[:-1], without(rest[-1], "final_obs", "_final_obs")),
    "neighbour's info": lambda *rest: (
        *rest[:-1],
        {key: roll(value) if key == "echo" else value for key, value in rest[-1].items()},
    ),
    "masks say that all have what some have": lambda *rest: (
        *rest[:-1],
        {key: np.ones_like(value) if key == "_int" else value for key, value in rest[-1].items()},
    ),
}
RESET_FAULTS: dict[str, Callable[..., Any]] = {
    "seeds not passed": lambda seed, options, num_envs: (None, options),
    "one seed for all": lambda seed, options, num_envs: ([seed] * num_envs if isinstance(seed, int) else seed, options),
    "seed list ignored": lambda seed, options, num_envs: (None if isinstance(seed, list) else seed, options),
    "options not passed": lambda seed, options, num_envs: (
        seed,
        {"reset_mask": options["reset_mask"]} if options and "reset_mask" in options else None,
    ),
    "resets all": lambda seed, options, num_envs: (seed, without(options, "reset_mask")),
}


def with_fault(name: str) -> type[Sound]:
    class Planted(Sound):
        def step(self, actions):
            result = super().step(actions)
            return STEP_FAULTS[name](*result) if name in STEP_FAULTS else result

        def reset(self, *, seed=None, options=None):
            given = RESET_FAULTS[name](seed, options, self.num_envs) if name in RESET_FAULTS else (seed, options)
            return super().reset(seed=given[0], options=given[1])

    return Planted


FAULTS = {each.__name__: each for each in Sound.__subclasses__()} | {
    name: with_fault(name) for name in (*STEP_FAULTS, *RESET_FAULTS)
}
FOUND_LATE = (  # after many of the checks
    *(LateFinalObs.__name__, SharedRewards.__name__, SharedObservations.__name__, StaleAfterReset.__name__),
    *("lost final obs", "resets all", "options not passed"),
)


@pytest.mark.parametrize(
    "planted", [pytest.param(each, marks=pytest.mark.slow if each in FOUND_LATE else ()) for each in FAULTS]
)
def test_a_planted_fault_is_found(planted):
    with pytest.raises(CheckFailed):
        check_frontend(FAULTS[planted])


@pytest.mark.slow
def test_a_sound_vector_env_passes():
    check_frontend(Sound)


@pytest.mark.slow
def test_gymnasiums_own_is_refused_for_changing_its_callers_options():
    with pytest.raises(CheckFailed, match="changed its arguments"):
        check_frontend(SyncVectorEnv)


@pytest.mark.parametrize("backend", ["serial", "thread"])
@pytest.mark.slow
def test_ours_passes(backend):
    check_frontend(lambda env_fns, **arguments: stepmill.VectorEnv(env_fns, backend=backend, **arguments))
