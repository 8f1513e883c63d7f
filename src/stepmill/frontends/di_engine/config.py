"""Reads the settings of the managers, which are those of DI-engine with their defaults, and some of stepmill.

The module also reads arguments that are given per env. It lists the methods that DI-engine's classes call on themselves
and these classes do not. A subclass that overrides such a method is refused.
"""

from __future__ import annotations

import copy
import numbers
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stepmill.frontends.di_engine.errors import ManagerUsageError
from stepmill.frontends.di_engine.trees import Tree
from stepmill.pool.port import whole_ids
from stepmill.spec.errors import ArgumentTypeError
from stepmill.spec.options import OptionKeywords, PoolOptions, flat_options, merge_options

BASE: dict[str, Any] = {
    "episode_num": float("inf"),  # episodes per env
    "max_retry": 1,  # attempts at a reset, and with the base managers also at a step
    "retry_type": "reset",  # or "renew": a new process for the next attempt
    "auto_reset": True,
    "step_timeout": None,  # seconds
    "reset_timeout": None,
    "retry_waiting_time": 0.1,
}
ASYNC: dict[str, Any] = {
    **BASE,
    "shared_memory": True,
    "copy_on_get": True,
    "context": "fork",
    "wait_num": 2,  # a step waits for this many timesteps ...
    "step_wait_timeout": 0.01,  # ... and for more until this many seconds after it began
    "connect_timeout": 60,
    "reset_inplace": False,
    # of stepmill
    "num_workers": None,  # None is one process per env; a number of processes shares the envs
    "max_get": float("inf"),  # a step returns at most this many timesteps
    "step_deadline": None,  # seconds after which a step returns with less than wait_num timesteps, but not without any
    "linger": 0.0,  # seconds that a step waits for more once wait_num have arrived
    "on_error": "close",  # or "abnormal": an env that raises returns an abnormal timestep, and the manager stays open
}
SYNC: dict[str, Any] = {**ASYNC, "wait_num": float("inf"), "step_wait_timeout": None}
# Keyword arguments of a supervisor, in addition to those that it names.
SUPERVISOR: dict[str, Any] = {
    **dict.fromkeys(("num_workers", "reset_timeout", "retry_waiting_time", "step_timeout")),
    **{name: ASYNC[name] for name in ("context", "copy_on_get", "episode_num", "linger", "shared_memory")},
}


_INSTEAD = (
    "override reset() or step(), put its code into the env or into a wrapper of the env, or use DI-engine's class"
)
NOT_CALLED_BY_BASE = dict.fromkeys(("_reset", "_step"), _INSTEAD)
NOT_CALLED_BY_SUBPROCESS = dict.fromkeys(
    ("_check_data", "_create_env_subprocess", "_reset", "worker_fn", "worker_fn_robust"), _INSTEAD
)
NOT_CALLED_BY_SUPERVISOR = dict.fromkeys(
    (
        *("_cleanup_queue", "_create_env_ref", "_detect_timeout", "_enable_env_replay", "_recv_callback"),
        *("_recv_reset_callback", "_recv_step_callback", "_reset", "_send_seed", "_set_shared_obs", "_shm_callback"),
        *("change_state", "register"),
    ),
    _INSTEAD,
)


def _as_config(settings: Mapping[str, Any]) -> Any:
    """Return settings as an EasyDict if that is installed, else as a Tree."""
    try:
        from easydict import EasyDict
    except ImportError:
        return Tree(settings)
    return EasyDict(settings)


EMPTY = _as_config({})  # the default of a manager's `cfg`, as in DI-engine; it is not changed


def default_config(config: Mapping[str, Any], class_name: str) -> Any:
    """Return a deep copy of a class's settings, an EasyDict if that is installed."""
    return _as_config({**copy.deepcopy(dict(config)), "cfg_type": f"{class_name}Dict"})


def with_defaults(cfg: Mapping[str, Any] | None, config: Mapping[str, Any]) -> Any:
    """Return the user's settings, with the class's defaults for those that are missing, as `default_config` does."""
    return _as_config({**copy.deepcopy(dict(config)), **(cfg or {})})


# Options of a pool that are settings of the managers under another name.
_SETTING_OF_OPTION = {
    "context": "context",
    "copy": "copy_on_get",
    "num_episodes": "episode_num",
    "num_workers": "num_workers",
    "reset_timeout_s": "reset_timeout",
    "step_timeout_s": "step_timeout",
}
# Options that a manager sets itself, besides all of `resets`: where envs run, and how episodes begin, end and fail.
_CHOSEN_BY_MANAGER = (
    *("autoreset_mode", "backend", "envs_per_worker", "episode_stats", "on_fault", "seeding"),
    *("restarts.max_env_errors", "restarts.on_raise", "restarts.replay_log_bytes"),
)


def settings_in(keywords: OptionKeywords) -> dict[str, Any]:
    """Return those options of a pool that are settings of a manager, under the names of the settings.

    Raises:
        UsageError: a keyword is not an option; the text names the nearest one.
        ManagerUsageError: a manager sets the option itself.
    """
    given = flat_options(keywords)
    refused = sorted(name for name in given if name in _CHOSEN_BY_MANAGER or name.startswith("resets."))
    if refused:
        raise ManagerUsageError(f"{', '.join(refused)}: a manager sets this itself; leave it out, or use stepmill.Pool")
    return {setting: given[name] for name, setting in _SETTING_OF_OPTION.items() if name in given}


def options_in(keywords: OptionKeywords) -> PoolOptions:
    """Return the options of a pool that are not settings of a manager; `settings_in` has checked the keywords."""
    return merge_options(None, {name: value for name, value in keywords.items() if name not in _SETTING_OF_OPTION})


def seeds_by_env(seed: object, num_envs: int, type_text: str = "invalid seed arguments type") -> dict[int, int]:
    """Return the seeds of envs: s gives env i the seed s + i; a list has one per env; a dict has those of some envs.

    `type_text` begins the text of a TypeError, which differs among DI-engine's classes.

    Raises:
        AssertionError: a list of another length.
        TypeError: another type.
    """
    if isinstance(seed, numbers.Integral):
        return {env_id: int(seed) + env_id for env_id in range(num_envs)}
    if isinstance(seed, list):
        if len(seed) != num_envs:
            raise ManagerUsageError(f"len(seed) {len(seed)} != env_num {num_envs}")
        return dict(enumerate(seed))
    if isinstance(seed, Mapping):
        return dict(zip(whole_ids(seed), seed.values(), strict=True))
    raise ArgumentTypeError(f"{type_text}: {type(seed)}")


def replay_paths(path: str | Path | Sequence[str | Path], num_envs: int) -> list[str]:
    """Return one path per env."""
    if isinstance(path, (str, Path)):
        return [str(path)] * num_envs
    return [str(one) for one in path]
