"""The keyword arguments that ALF's classes take last, and those that are ours; and the pool's options that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
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
