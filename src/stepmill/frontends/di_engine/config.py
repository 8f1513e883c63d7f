"""The settings of the managers: DI-engine's names and defaults, and a few of ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

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
