"""stepmill for ALF's users: `FastParallelEnvironment` and `ProcessEnvironment`, in place of its own.

Where ALF can be imported, `FastParallelEnvironment` is a subclass of its class of that name, and is registered as configurable.

    parallel       `FastParallelEnvironment`
    process        `ProcessEnvironment`
    handles        one env of a parallel environment: its methods as promises, its attributes by name
    configuration  the keyword arguments of these classes; ALF's class as a base, and ALF's configuration
    nests          nests of arrays to nests of tensors and back; the only import of torch
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
    """Load a public name from its module, once. Where ALF is installed, FastParallelEnvironment is made a subclass of its class."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module 'stepmill.frontends.alf' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    if name == "FastParallelEnvironment":
        value = import_module("stepmill.frontends.alf.configuration").join_to_alf(value, __name__)
    globals()[name] = value
    return value
