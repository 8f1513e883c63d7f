"""The settings of the managers: DI-engine's names and defaults, and a few of ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from stepmill.frontends.di_engine.errors import ManagerUsageError
from stepmill.spec.options import OptionKeywords, PoolOptions, check_option_names, merge_options

BASE: dict[str, Any] = {
    "episode_num": float("inf"),  # episodes per env
    "max_retry": 1,  # attempts at a reset; at a step, too, in line
    "retry_type": "reset",  # or "renew": in a new process
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
    "wait_num": 2,  # a step waits for so many timesteps ...
    "step_wait_timeout": 0.01,  # ... but not longer than so many seconds, if one is there
    "connect_timeout": 60,
    "reset_inplace": False,
    # ours
    "num_workers": None,  # None is one process per env; else so many processes share the envs
    "max_get": float("inf"),  # a step returns at most so many timesteps
    "linger": 0.0,  # seconds that a step waits for more when wait_num are there
    "on_error": "close",  # or "abnormal": an env that raises gives an abnormal timestep, and the manager goes on
}
SYNC: dict[str, Any] = {**ASYNC, "wait_num": float("inf"), "step_wait_timeout": None}


class Config(dict[str, Any]):
    """A dict whose keys are attributes, too: what stands for EasyDict where that is not installed."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the config has no {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


def default_config(config: Mapping[str, Any], class_name: str) -> Any:
    """Return a deep copy of a class's settings, as EasyDict if that is installed."""
    settings = {**copy.deepcopy(dict(config)), "cfg_type": f"{class_name}Dict"}
    try:
        from easydict import EasyDict
    except ImportError:
        return Config(settings)
    return EasyDict(settings)


def complete(cfg: Mapping[str, Any] | None, config: Mapping[str, Any]) -> Config:
    """Return the user's settings, with the class's where there are none."""
    return Config({**copy.deepcopy(dict(config)), **dict(cfg or {})})


# Options of a pool for which the managers have names of their own.
_SETTING_OF_OPTION = {
    "context": "context",
    "copy": "copy_on_get",
    "linger_s": "linger",
    "num_episodes": "episode_num",
    "num_workers": "num_workers",
    "reset_timeout_s": "reset_timeout",
    "step_timeout_s": "step_timeout",
}
# Options that say how an episode begins, ends and fails, and where envs run: a manager chooses them itself.
_CHOSEN_BY_MANAGER = (
    *("autoreset_mode", "backend", "envs_per_worker", "episode_stats", "max_env_errors", "on_fault", "on_raise"),
    *("overlap_resets", "persist_options", "replay_log_bytes", "reset_retries", "reset_retry_in", "reset_retry_wait_s"),
    *("seeding", "spare_envs"),
)


def settings_in(keywords: OptionKeywords) -> dict[str, Any]:
    """Return those options of a pool that are settings of a manager, by the names that they have there.

    Raises:
        UsageError: a keyword is no option; names the nearest one.
        ManagerUsageError: a manager chooses the option itself.
    """
    check_option_names(keywords)
    refused = [name for name in _CHOSEN_BY_MANAGER if name in keywords]
    if refused:
        raise ManagerUsageError(f"{', '.join(refused)}: a manager chooses this itself, by its class and its settings")
    given: dict[str, Any] = {**keywords}
    return {setting: given[name] for name, setting in _SETTING_OF_OPTION.items() if name in given}


def options_in(keywords: OptionKeywords) -> PoolOptions:
    """Return the options of a pool for which a manager has no setting; what `settings_in` has checked."""
    return merge_options(None, {name: value for name, value in keywords.items() if name not in _SETTING_OF_OPTION})
