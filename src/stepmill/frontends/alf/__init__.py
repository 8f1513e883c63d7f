"""stepmill for ALF's users: `FastParallelEnvironment` and `ProcessEnvironment`, in the place of its own.

Where ALF can be imported, `FastParallelEnvironment` is an `AlfEnvironment` and is registered as configurable.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stepmill.envs.alf_batch import BatchEnvironmentWrapper
    from stepmill.frontends.alf.parallel import FastParallelEnvironment
    from stepmill.frontends.alf.process import ProcessEnvironment

__all__ = ["BatchEnvironmentWrapper", "FastParallelEnvironment", "ProcessEnvironment"]

_HOME_OF = {
    "BatchEnvironmentWrapper": "stepmill.envs.alf_batch",
    "FastParallelEnvironment": "stepmill.frontends.alf.parallel",
    "ProcessEnvironment": "stepmill.frontends.alf.process",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its file, once; the parallel environment joins ALF's classes, if there are any."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'stepmill.frontends.alf' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    if name == "FastParallelEnvironment":
        value = _registered(value)
    globals()[name] = value
    return value


def _registered(cls: type) -> Any:
    """Return a class as ALF knows it, or as it is where there is no ALF."""
    try:
        import alf  # type: ignore[import-not-found]  # ALF is not on PyPI
        from alf.environments.alf_environment import AlfEnvironment  # type: ignore[import-not-found]
    except ImportError:
        return cls
    joined = type(cls.__name__, (cls, AlfEnvironment), {"__module__": __name__, "__doc__": cls.__doc__})
    return alf.configurable(joined)
