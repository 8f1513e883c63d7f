"""Joins `FastParallelEnvironment` to ALF where ALF can be imported: to its base class and to its configuration.

`alf.config("FastParallelEnvironment", ...)` must stay unambiguous while ALF's own class of that name is registered. So the
arguments that both classes have are configured once, for both, through ALF's class; only the arguments that ALF's class
lacks are registered for ours.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from typing import Any

from stepmill.frontends.alf.arguments import Chosen
from stepmill.spec.options import PoolOptions

_ORIGINAL = "alf.environments.fast_parallel_environment"
_GIN_SWITCH = "ALF_USE_GIN"


def joined_to_alf(cls: Any, module: str) -> Any:
    """Return a subclass of `cls` that is an AlfEnvironment and configurable; `cls` itself where there is no ALF."""
    try:
        alf = import_module("alf")
        base = import_module("alf.environments.alf_environment").AlfEnvironment
        original = import_module(_ORIGINAL).FastParallelEnvironment
    except ImportError:
        return cls
    signature = _full_signature(cls)
    shared = [name for name in inspect.signature(original).parameters if name in signature.parameters]

    def construct(self: Any, *args: Any, **keywords: Any) -> None:
        given = {*list(signature.parameters)[: len(args)], *keywords}
        configured = _configured(alf, [name for name in shared if name not in given])
        cls.__init__(self, *args, **configured, **keywords)

    construct.__name__ = "__init__"  # ALF replaces the attribute that has the function's name
    namespace = {"__module__": module, "__doc__": cls.__doc__, "__init__": construct, "__signature__": signature}
    joined = type(cls.__name__, (cls, base), namespace)
    own = [name for name in signature.parameters if name not in shared]
    with _without_gin():
        return alf.configurable(whitelist=own)(joined)


def _full_signature(cls: Any) -> inspect.Signature:
    """Return the constructor's signature with a parameter for each keyword that it takes."""
    positional = [p for p in inspect.signature(cls).parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = dict.fromkeys([field.name for field in (*fields(Chosen), *fields(PoolOptions))])
    taken = {p.name for p in positional}
    keywords = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names if name not in taken
    ]
    return inspect.Signature([*positional, *keywords])


def _configured(alf: Any, names: list[str]) -> Mapping[str, Any]:
    """Return the values that the user configured for arguments of ALF's class, by alf.config() or else by gin."""
    gin = import_module("gin")
    found = {}
    for name in names:
        full_name = f"{_ORIGINAL}.FastParallelEnvironment.{name}"
        if alf.config_util._get_config_node(full_name).is_configured():
            found[name] = alf.get_config_value(full_name)  # also marks it as used
            continue
        try:
            found[name] = gin.query_parameter(full_name)
        except ValueError:  # not bound
            pass
    return found


@contextmanager
def _without_gin() -> Iterator[None]:
    """Keep gin from registering a second class of the same name: gin files that name the class would be ambiguous."""
    before = os.environ.get(_GIN_SWITCH)
    os.environ[_GIN_SWITCH] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_GIN_SWITCH]
        else:
            os.environ[_GIN_SWITCH] = before
