"""The keyword arguments that ALF's classes take last, and those that are ours; and the pool's options that follow."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, Literal

from stepmill.frontends.alf import errors
from stepmill.spec.options import BackendName, Context, EngineKeywords, PoolOptions, merge_options

CONTEXTS = ("fork", "spawn", "forkserver")


class AlfKeywords(EngineKeywords, total=False):
    """The fields of `Chosen` and of PoolOptions as keyword arguments."""

    start_method: Literal["fork", "spawn", "forkserver"]
    as_tensors: bool | None
    device: object
    name: str
    options: PoolOptions | None


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The keyword arguments, with defaults.

    Attributes:
        start_method: how processes start.
        num_workers: processes to share the envs among; None gives each its own.
        as_tensors: tensors or arrays; None is tensors where there is torch.
        device: of tensors; None is ALF's default device.
        name: without effect.
        options: of the engine.
    """

    start_method: str = "fork"
    num_workers: int | None = None
    as_tensors: bool | None = None
    device: object = None
    name: str = ""
    options: PoolOptions | None = None

    @classmethod
    def read(cls, keywords: Mapping[str, Any]) -> Chosen:
        """Return the keyword arguments of a class; those that are no field here are fields of PoolOptions."""
        names = {each.name for each in fields(cls)}
        own = {name: value for name, value in keywords.items() if name in names}
        of_pool = {name: value for name, value in keywords.items() if name not in names}
        return cls(**{**own, "options": merge_options(own.get("options"), of_pool)})

    def pool_options(
        self, *, num_threads: int | None, start_serially: bool = False, num_spares: int = 0
    ) -> PoolOptions:
        """Return a pool's options for ALF envs: a process for each env, resets begun early.

        Raises:
            StartMethodError: there is no such start method.
        """
        if self.start_method not in CONTEXTS:
            raise errors.StartMethodError(
                f"Unrecognized start method '{self.start_method}'; use one of {', '.join(map(repr, CONTEXTS))}"
            )
        given = PoolOptions() if self.options is None else self.options
        workers: dict[str, Any] = {}
        if self.num_workers is not None:
            workers = {"num_workers": self.num_workers, "envs_per_worker": None}
        elif given.num_workers is None and given.envs_per_worker is None:
            workers = {"envs_per_worker": 1}
        backend = BackendName.PROCESS if given.backend is BackendName.AUTO else given.backend
        of_processes: dict[str, Any] = {}
        if backend is BackendName.PROCESS:
            of_processes = {"context": Context(self.start_method), "worker_threads": num_threads}
        return replace(
            given,
            backend=backend,
            overlap_resets=True,
            episode_stats=False,
            start_serially=start_serially,
            spare_envs=num_spares,
            **workers,
            **of_processes,
        )


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
