"""stepmill for ALF's users: `FastParallelEnvironment` and `ProcessEnvironment`, in place of its own.

Where ALF can be imported, `FastParallelEnvironment` is an `AlfEnvironment` and is registered as configurable.

    parallel       `FastParallelEnvironment`
    process        `ProcessEnvironment`
    handles        one env of a parallel environment: its methods as promises, its attributes by name
    registration   joins `FastParallelEnvironment` to ALF's base class and configuration
    arguments      the keyword arguments of these classes
    nests          nests of arrays to nests of tensors and back
    tensors        arrays as torch tensors
    specs          ALF's specs of an env, and whether they are equal in all envs
    errors         errors that are also RuntimeErrors, as in ALF
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
        value = import_module("stepmill.frontends.alf.configuration").joined_to_alf(value, __name__)
    globals()[name] = value
    return value
