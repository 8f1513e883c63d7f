"""stepmill for ALF's users: `FastParallelEnvironment` and `ProcessEnvironment`, which replace ALF's classes.

Where ALF can be imported, `FastParallelEnvironment` is a subclass of its class of that name, and is registered as configurable.

    parallel       `FastParallelEnvironment`
    process        `ProcessEnvironment`
    handles        one env of a parallel environment: its methods as promises, its attributes by name; ALF's specs of an env, and
                   whether they are equal in all envs
    configuration  the keyword arguments of these classes; ALF's class as a base, and ALF's configuration
    nests          nests of arrays to nests of tensors and back; the only import of torch
    errors         errors that are also RuntimeErrors, as in ALF
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from stepmill._lazy_names import lazy_names

if TYPE_CHECKING:
    from stepmill.envs.alf_batch import BatchEnvironmentWrapper as BatchEnvironmentWrapper
    from stepmill.frontends.alf.parallel import FastParallelEnvironment as FastParallelEnvironment
    from stepmill.frontends.alf.process import ProcessEnvironment as ProcessEnvironment

_load, __dir__, __all__ = lazy_names(__name__)


def __getattr__(name: str) -> Any:
    """Load a public name from its module, once. Where ALF is installed, FastParallelEnvironment is made a subclass of its class."""
    value = _load(name)
    if name == "FastParallelEnvironment":
        value = import_module("stepmill.frontends.alf.configuration").join_to_alf(value, __name__)
        globals()[name] = value
    return value
