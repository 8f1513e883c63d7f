"""Defines the keyword arguments of both classes, and joins `FastParallelEnvironment` to ALF if ALF can be imported.

`alf.config("FastParallelEnvironment", ...)` must stay unambiguous while ALF's own class of that name is registered.
Therefore the arguments that both classes have are configured once, through ALF's class. Only the arguments that ALF's
class lacks are registered for ours.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from typing import Any, Literal

from stepmill.frontends.alf import errors
from stepmill.frontends.pool_options import options_of
from stepmill.spec.errors import ArgumentTypeError
from stepmill.spec.options import AutoresetMode, BackendName, Context, OptionKeywords, PoolOptions, merge_options

CONTEXTS = ("fork", "spawn", "forkserver")


class AlfKeywords(OptionKeywords, total=False):
    """The fields of `Arguments` and of PoolOptions as keyword arguments."""

    torch_num_threads_per_env: int | None
    start_method: Literal["fork", "spawn", "forkserver"]
    as_tensors: bool | None
    device: object
    name: str
    options: PoolOptions | None


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """The keyword arguments that are not PoolOptions, with defaults.

    Attributes:
        torch_num_threads_per_env: threads of torch, OpenMP and BLAS in each process; None does not change them.
        start_method: how processes start.
        num_workers: the number of processes; None gives each env its own.
        as_tensors: True for tensors, False for arrays; None means tensors if torch is installed.
        device: the device of tensors; None means ALF's default device.
        name: it has no effect.
        options: the options of the pool.
    """

    torch_num_threads_per_env: int | None = 1
    start_method: str = "fork"
    num_workers: int | None = None
    as_tensors: bool | None = None
    device: object = None
    name: str = ""
    options: PoolOptions | None = None

    @classmethod
    def read(cls, keywords: Mapping[str, Any], last: Sequence[object], names_of_last: Sequence[str]) -> Arguments:
        """Return the arguments for keywords. Those that are not fields of this class are fields of PoolOptions.

        Args:
            last: arguments that ALF's constructor takes by position, too; the names of the first of them are
                `names_of_last`.
        Raises:
            ArgumentTypeError: too many arguments, or one that is given twice.
        """
        if len(last) > len(names_of_last):
            raise ArgumentTypeError(
                f"{last[len(names_of_last) :]!r} follow {names_of_last[-1]}, the last argument that may be given by position; "
                "give options by name"
            )
        positional = dict(zip(names_of_last, last, strict=False))
        if twice := positional.keys() & keywords.keys():
            raise ArgumentTypeError(f"{', '.join(sorted(twice))} given by position and by name; give it once")
        keywords = {**keywords, **positional}
        names = {each.name for each in fields(cls)}
        own = {name: value for name, value in keywords.items() if name in names}
        of_pool = {name: value for name, value in keywords.items() if name not in names}
        return cls(**{**own, "options": merge_options(own.get("options"), of_pool)})

    def pool_options(self, *, start_serially: bool = False, num_spares: int = 0) -> PoolOptions:
        """Return the pool's options for ALF envs: a process for each env, and resets in the background.

        Raises:
            StartMethodError: an unknown start method.
            UsageError: another option has a value that ALF does not support.
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
        fixed: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "episode_stats": False}
        if backend is BackendName.PROCESS:
            fixed["context"] = Context(self.start_method)
            workers["workers"] = replace(given.workers, threads=self.torch_num_threads_per_env)
        chosen = replace(
            given,
            backend=backend,
            resets=replace(given.resets, overlap=True, spare_envs=num_spares),
            start=given.start if start_serially is False else replace(given.start, serially=start_serially),
            **workers,
        )
        return options_of("ALF", chosen, {}, fixed)


_ORIGINAL = "alf.environments.fast_parallel_environment"
_GIN_SWITCH = "ALF_USE_GIN"


def join_to_alf(cls: Any, module: str) -> Any:
    """Return a configurable subclass of `cls` and of ALF's class, which ALF's trainer needs. Without ALF, return `cls`.

    ALF's class is the last base, so that no method of `cls` is replaced.
    """
    try:
        alf = import_module("alf")
        original = import_module(_ORIGINAL).FastParallelEnvironment
    except ImportError:
        return cls
    signature = inspect.signature(cls)
    shared = [name for name in inspect.signature(original).parameters if name in signature.parameters]

    def construct(self: Any, *args: Any, **keywords: Any) -> None:
        given = {*list(signature.parameters)[: len(args)], *keywords}
        configured = _configured(alf, [name for name in shared if name not in given])
        cls.__init__(self, *args, **configured, **keywords)

    construct.__name__ = "__init__"  # ALF replaces the attribute that has the function's name
    namespace = {"__module__": module, "__doc__": cls.__doc__, "__init__": construct, "__signature__": signature}
    joined = type(cls.__name__, (cls, original), namespace)
    own = [name for name in signature.parameters if name not in shared]
    with _without_gin():
        return alf.configurable(whitelist=own)(joined)


def signature_of(cls: Any, names_of_last: Sequence[str]) -> inspect.Signature:
    """Return the constructor's signature with a parameter for each of its keywords, and for each that may follow by position."""
    defaults = {field.name: field.default for field in fields(Arguments)}
    positional = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    positional += [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=defaults[name])
        for name in names_of_last
    ]
    names = dict.fromkeys([*defaults, *(field.name for field in fields(PoolOptions))])
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
        node = alf.config_util._get_config_node(full_name)
        node.set_used()  # alf.config() refuses another value from now on
        if node.is_configured():
            found[name] = node.get_value()
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
