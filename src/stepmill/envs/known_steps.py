"""Finds which registered env a function makes, by reading the function, and how long a step of this env takes at most.

A function is read and never called. It is understood if it names one registered env, and if everything else that it uses is a value,
Gymnasium's `make`, or a wrapper that adds little to a step. Functions of programs look like this:

    lambda: gym.make("CartPole-v1")            functools.partial(gym.make, "CartPole-v1")            CartPoleEnv
    the functions of Stable-Baselines3's make_vec_env, of RL Zoo and of CleanRL, and TorchRL's GymEnv
"""

from __future__ import annotations

import builtins
import dis
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import is_dataclass
from functools import partial
from types import CodeType, FunctionType, ModuleType

import gymnasium
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

# Gymnasium's envs whose step takes 8 µs or less. Some of them are faster on the serial backend than in workers.
_TINY_ENVS = frozenset(
    {
        "gymnasium.envs.classic_control.cartpole:CartPoleEnv",
        "gymnasium.envs.classic_control.continuous_mountain_car:Continuous_MountainCarEnv",
        "gymnasium.envs.classic_control.mountain_car:MountainCarEnv",
        "gymnasium.envs.classic_control.pendulum:PendulumEnv",
        "gymnasium.envs.toy_text.cliffwalking:CliffWalkingEnv",
        "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv",
        "gymnasium.envs.toy_text.taxi:TaxiEnv",
    }
)
_TINY_STEP_S = 8e-6
_CHEAP_WRAPPERS = (
    "Autoreset", "ClipAction", "ClipReward", "DtypeObservation", "FilterObservation", "FlattenObservation", "GymEnv", "Monitor", "NormalizeObservation",
    "NormalizeReward", "OrderEnforcing", "PassiveEnvChecker", "RecordEpisodeStatistics", "RecordVideo", "RescaleAction",
    "TimeAwareObservation", "TimeLimit", "TransformAction", "TransformObservation", "TransformReward",
)  # fmt: skip
_CHEAP_NAMES = {
    *_CHEAP_WRAPPERS, "action_space", "clip", "gym", "gymnasium", "inf", "make", "np", "observation_space", "seed", "spec", "wrappers",
}  # fmt: skip
_PIXELS = ("from_pixels", "pixels_only")  # with these, TorchRL's GymEnv renders in each step
_SB3 = "stable_baselines3.common.env_util"  # its functions add a Monitor, and the wrapper that they were given
_READS_VARIABLE = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the last two in the body of a class
_MAX_DEPTH = 4  # of functions that call functions


def known_step_s(spec: GymnasiumSpec) -> float | None:
    """Return how many seconds a step of a registered env takes at most, or None if that is not known in advance."""
    is_known = (
        spec.entry_point in _TINY_ENVS and not spec.additional_wrappers and spec.kwargs.get("render_mode") is None
    )
    return _TINY_STEP_S if is_known else None


def longest_step_s(env_fns: Iterable[Callable[[], object]]) -> float | None:
    """Return how many seconds a step of any of these envs takes at most. None if a function is not understood."""
    longest_s = 0.0
    for env_fn in {id(env_fn): env_fn for env_fn in env_fns}.values():
        found: list[float | None] = []
        is_read = _read(env_fn, found, 0)
        if not is_read or len({*found}) != 1 or found[0] is None:
            return None
        longest_s = max(longest_s, found[0])
    return longest_s


def _read(value: object, found: list[float | None], depth: int) -> bool:
    """Add the steps of the envs that a value of a function names to `found`. Return False if the value is not understood."""
    if depth > _MAX_DEPTH:
        return False
    if value is None or value is gymnasium.make or isinstance(value, (bool, int, float, str)):
        spec = gymnasium.registry.get(value) if isinstance(value, str) else None
        found += [] if spec is None else [known_step_s(spec)]
        return value not in _PIXELS
    if isinstance(value, GymnasiumSpec):
        found.append(known_step_s(value))
        return True
    if isinstance(value, (tuple, list, frozenset)):
        return all(_read(each, found, depth + 1) for each in value)
    if isinstance(value, dict):
        return all(_read(each, found, depth + 1) for each in (*value, *value.values()))
    if isinstance(value, partial):
        return _read((value.func, value.args, value.keywords), found, depth + 1)
    if isinstance(value, type):
        entry_point = f"{value.__module__}:{value.__qualname__}"
        found += [_TINY_STEP_S] if entry_point in _TINY_ENVS else []
        return entry_point in _TINY_ENVS or value.__name__ in _CHEAP_WRAPPERS
    if isinstance(value, FunctionType):
        return _read_function(value, found, depth)
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0] in ("gymnasium", "numpy")
    # GymnasiumEnvMaker, and the object of RL Zoo that makes the envs of a training
    spec = getattr(value, "spec", None)
    return isinstance(spec, GymnasiumSpec) and _read((spec, getattr(value, "wrappers", ())), found, depth + 1)


def _read_function(function: FunctionType, found: list[float | None], depth: int) -> bool:
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # the cell is empty
        return False
    names: set[str] = set()
    variables: set[str] = set()  # the other names are of attributes
    if function.__module__ != _SB3:
        codes = [function.__code__]
        for code in codes:
            names.update(code.co_names)
            variables.update(each.argval for each in dis.get_instructions(code) if each.opname in _READS_VARIABLE)
            codes += [each for each in code.co_consts if isinstance(each, CodeType)]
            values += [each for each in code.co_consts if not isinstance(each, CodeType) and each != function.__doc__]
    known = {name: function.__globals__[name] for name in variables & function.__globals__.keys()}
    values += [function.__defaults__, function.__kwdefaults__, *known.values()]
    parsed = [each for each in values if isinstance(each, Namespace) or _is_record(each)]  # arguments of the program
    fields = [(name, vars(each)[name]) for each in parsed for name in names & vars(each).keys()]
    others = names - known.keys() - dict(fields).keys() - _CHEAP_NAMES - vars(builtins).keys()
    read = [*(each for each in values if not any(each is one for one in parsed)), *(value for _, value in fields)]
    return not others and all(_read(each, found, depth + 1) for each in read)


def _is_record(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, (type, GymnasiumSpec)) and not hasattr(value, "spec")
