"""`ParallelEnv`: `StepmillEnv` with the arguments of TorchRL's ParallelEnv, of which it is a virtual subclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torchrl.envs
from torchrl._utils import seed_generator
from torchrl.data.utils import CloudpickleWrapper

from stepmill.frontends.torchrl.env import StepmillEnv, replace_class
from stepmill.frontends.torchrl.errors import ArgumentCountError
from stepmill.frontends.torchrl.makers import Kwargs
from stepmill.pool.port import checked_fns

if TYPE_CHECKING:
    from typing_extensions import Self


class ParallelEnv(StepmillEnv):
    """Presents N envs as one TorchRL env, which a pool runs on any backend.

    TorchRL recognizes this env as its ParallelEnv: a `Collector` saves the state of its envs, and passes it
    `create_env_kwargs`.

    Args:
        num_workers: N, the number of envs. The number of processes is `envs_per_worker`, or `num_workers` of `options`.
        create_env_fn: the function that makes each env, or a list with one per env.
        **keywords: as for `StepmillEnv`: arguments of TorchRL's ParallelEnv, fields of PoolOptions by name, and others.
    Raises:
        RuntimeError: the length of the list is not N.
    """

    _arguments: tuple[tuple[Any, ...], dict[str, Any]]
    _has_new_kwargs = False

    def __new__(cls, *args: Any, **keywords: Any) -> Self:
        """Keep the arguments, also those of a subclass, for `__reduce__`."""
        made: Self = super().__new__(cls, *args, **keywords)
        made.__dict__["_arguments"] = args, keywords
        return made

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        """Close the envs, as TorchRL does, and return a function that makes new ones: `MultiSyncCollector` pickles the env."""
        args, keywords = self._arguments
        changed = self.create_env_kwargs if self._has_new_kwargs else None
        self.close()
        return CloudpickleWrapper(
            partial(_make_again, partial(type(self), *args, **keywords), changed, self.device)
        ), ()

    def __init__(
        self, num_workers: int, create_env_fn: Callable[..., object] | Sequence[Callable[..., object]], **keywords: Any
    ) -> None:
        functions = [create_env_fn] * num_workers if callable(create_env_fn) else checked_fns(create_env_fn)
        if len(functions) != num_workers:
            raise ArgumentCountError(
                f"len(create_env_fn) and num_workers mismatch, got {len(functions)} and {num_workers}; give one function, "
                "or a list with one per env"
            )
        super().__init__(functions, **keywords)
        self.create_env_fn = functions

    def set_seed(self, seed: Any = None, static_seed: bool = False) -> int | None:
        """Set the seeds of the envs' next resets as TorchRL does, and return the seed that follows.

        Args:
            seed: the seed of env 0, from which those of the other envs are drawn one after the other; or a list with one per env.
            static_seed: True gives all envs the same seed.
        """
        is_one = isinstance(seed, (int, np.integer))
        if not is_one or static_seed or seed < 0:  # a number below 0 is refused there
            return super().set_seed([int(seed)] * self.num_workers if is_one else seed, static_seed)
        seeds = list(accumulate(range(self.num_workers), lambda last, _: seed_generator(last), initial=int(seed)))
        super().set_seed(seeds[:-1])
        return seeds[-1]

    def update_kwargs(self, kwargs: Kwargs | Sequence[Kwargs]) -> None:
        """Like `StepmillEnv.update_kwargs`."""
        super().update_kwargs(kwargs)
        self._has_new_kwargs = True

    @classmethod
    def make_parallel(cls, *args: Any, num_envs: int = 1, **keywords: Any) -> ParallelEnv:
        """Return `cls(num_workers, create_env_fn, ...)`; the first argument may be the function, and `num_envs` the number."""
        return cls(*args, **keywords) if args and isinstance(args[0], int) else cls(num_envs, *args, **keywords)


def _make_again(make: Callable[[], ParallelEnv], kwargs: Sequence[Kwargs] | None, device: Any) -> ParallelEnv:
    env = make()
    if kwargs is not None:
        env.update_kwargs(kwargs)
    if env.device != device:
        env.to(device)
    return env


replace_class(ParallelEnv, torchrl.envs.ParallelEnv)
