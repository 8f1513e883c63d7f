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


class WrongOrder(Sound):
    """Rows are not in the order of the envs."""

    def step(self, actions):
        obs, *rest = super().step(actions)
        return (roll(obs), *rest)


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


class NeighboursReward(Sound):
    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return (obs, np.roll(reward, 1), *rest)


class LostFinalObs(Sound):
    """SAME_STEP tells nothing of the last observation."""

    def step(self, actions):
        *rest, infos = super().step(actions)
        return (*rest, {key: value for key, value in infos.items() if key not in ("final_obs", "_final_obs")})


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


class SeedsNotPassed(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(options=options)


class OneSeedForAll(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=[seed] * self.num_envs if isinstance(seed, int) else seed, options=options)


class SeedListIgnored(Sound):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=None if isinstance(seed, list) else seed, options=options)


class OptionsNotPassed(Sound):
    def reset(self, *, seed=None, options=None):
        mask = {"reset_mask": options["reset_mask"]} if options and "reset_mask" in options else None
        return super().reset(seed=seed, options=mask)


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


class FlagsSwapped(Sound):
    def step(self, actions):
        obs, reward, terminated, truncated, infos = super().step(actions)
        return obs, reward, truncated, terminated, infos


class NeighboursInfo(Sound):
    """Infos are those of the row beside."""

    def step(self, actions):
        *rest, infos = super().step(actions)
        infos["echo"] = roll(infos["echo"]) if "echo" in infos else None
        return (*rest, infos)


class InfoMasksFull(Sound):
    """Masks say that all have what only some have."""

    def step(self, actions):
        *rest, infos = super().step(actions)
        masks = {key: np.ones_like(value) for key, value in infos.items() if key == "_int"}
        return (*rest, {**infos, **masks})


class ResetsAll(Sound):
    """A partial reset resets all."""

    def reset(self, *, seed=None, options=None):
        rest = {key: value for key, value in options.items() if key != "reset_mask"} if options else options
        return super().reset(seed=seed, options=rest)


class NarrowRewards(Sound):
    def step(self, actions):
        obs, reward, *rest = super().step(actions)
        return (obs, reward.astype(np.float32), *rest)


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


FAULTS: list[Callable[..., Any]] = [
    WrongOrder,
    StaleAfterReset,
    StaleAfterAutoreset,
    NeighboursReward,
    LostFinalObs,
    LateFinalObs,
    ActsOnNewEpisode,
    SeedsNotPassed,
    OneSeedForAll,
    SeedListIgnored,
    OptionsNotPassed,
    OptionsEaten,
    ActionsChanged,
    SharedObservations,
    SharedRewards,
    FlagsSwapped,
    NeighboursInfo,
    InfoMasksFull,
    ResetsAll,
    NarrowRewards,
    FewerRows,
    UnknownMode,
]
FOUND_LATE = (  # after many of the checks
    LateFinalObs,
    LostFinalObs,
    SharedRewards,
    SharedObservations,
    ResetsAll,
    StaleAfterReset,
    OptionsNotPassed,
)


@pytest.mark.parametrize(
    "planted", [pytest.param(each, marks=pytest.mark.slow if each in FOUND_LATE else ()) for each in FAULTS]
)
def test_a_planted_fault_is_found(planted):
    with pytest.raises(CheckFailed):
        check_frontend(planted)


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
