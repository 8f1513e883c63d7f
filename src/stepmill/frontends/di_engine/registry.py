"""Managers by their names, and DI-engine's own registry."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from stepmill.frontends.di_engine.base import BaseEnvManager, BaseEnvManagerV2
from stepmill.frontends.di_engine.manager import Manager
from stepmill.frontends.di_engine.processes import (
    AsyncSubprocessEnvManager,
    GymVectorEnvManager,
    SubprocessEnvManagerV2,
    SyncSubprocessEnvManager,
)
from stepmill.spec.errors import UsageError

MANAGERS: dict[str, type[Manager]] = {
    "base": BaseEnvManager,
    "base_v2": BaseEnvManagerV2,
    "async_subprocess": AsyncSubprocessEnvManager,
    "subprocess": SyncSubprocessEnvManager,
    "subprocess_v2": SubprocessEnvManagerV2,
    "gym_vector": GymVectorEnvManager,
}
logger = logging.getLogger("stepmill.di_engine")

THEIRS = ("env_pool",)  # names of DI-engine that stay its own


def create_env_manager(manager_cfg: Mapping[str, Any], env_fn: Sequence[Callable[[], Any]]) -> Any:
    """Make a manager by the name in a config, which is not changed.

    Args:
        manager_cfg: its settings, with "type", a name of `MANAGERS`, and maybe "import_names", modules to be imported.
        env_fn: functions that make the envs.
    Raises:
        UsageError: no such name.
    """
    settings = copy.deepcopy(dict(manager_cfg))
    import_all(settings.pop("import_names", []))
    return manager_class(settings.pop("type", None))(env_fn, settings)


def get_env_manager_cls(cfg: Mapping[str, Any]) -> Any:
    """Return the class that `create_env_manager` would use."""
    import_all(cfg.get("import_names", []))
    return manager_class(cfg.get("type"))


def manager_class(name: object) -> Any:
    """Return the manager of that name; DI-engine's own for those that are not ours."""
    if name in MANAGERS:
        return MANAGERS[str(name)]
    if name in THEIRS and has_ding():
        return _their_registry().get(name)
    raise UsageError(f"there is no manager {name!r}; use one of {sorted(MANAGERS)}")


def register() -> None:
    """Put our managers under their names into DI-engine's registry, in place of its own: `create_env_manager` finds ours."""
    registry = _their_registry()
    for name, cls in MANAGERS.items():
        registry.register(name, cls, force_overwrite=True)


def register_if_there() -> None:
    """Do so where DI-engine is installed; say so if it is and cannot be imported."""
    if not has_ding():
        return
    try:
        register()
    except ImportError as error:
        logger.warning("DI-engine cannot be imported, and keeps its own managers: %s", error)


def has_ding() -> bool:
    """Whether DI-engine is installed."""
    return importlib.util.find_spec("ding") is not None


def import_all(names: str | Sequence[str]) -> None:
    """Import modules by name."""
    for name in [names] if isinstance(names, str) else names:
        importlib.import_module(name)


def _their_registry() -> Any:
    # The package registers its own managers when it is imported: ours come after.
    importlib.import_module("ding.envs")
    return importlib.import_module("ding.utils").ENV_MANAGER_REGISTRY
