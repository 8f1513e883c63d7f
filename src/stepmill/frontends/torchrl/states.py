"""`state_dict` and `load_state_dict` of envs that run: what they keep beyond an episode, as TorchRL's users save it.

    {"worker0": {"NormalizeObservation.obs_rms": {"mean": tensor, ...}, "MyEnv": what MyEnv.state_dict() returns},
     "worker1": ...}

There is an entry per env. The parts of an env are those of `layers.py`; an env that keeps nothing has an empty one.
"""

from __future__ import annotations

import copy
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from stepmill.frontends.torchrl.layers import Parts, is_statistics, load_part, part_names, read_parts
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvError, StepmillError, UsageError, join_errors

_WORKER = re.compile(r"worker\d+")


class States:
    """Reads and loads the state of a pool's envs, and gives what was loaded to the pool that takes its place.

    What is loaded into an env is given to it again whenever it is built anew, before it is reset: by a worker that is
    restarted (the pool sees to that), and by another pool. Each part is set on its own, so that what was loaded for the
    others stays known.
    """

    def __init__(self) -> None:
        self._setters: dict[
            str, Callable[[Any, Any], object]
        ] = {}  # by part, always the same: the pool knows it by that
        self._common: dict[str, Any] = {}  # by part, what all envs were given, spares too
        self._own: dict[str, dict[int, Any]] = {}  # by part and env, what some were given since

    def read(self, pool: Pool, env_ids: Sequence[int]) -> OrderedDict[str, Any]:
        """Return the state of some envs, "worker0" for the first of them. Tensors are on the CPU, and nobody else's."""
        states = pool.get_attr(read_parts, env_ids=env_ids)
        return OrderedDict((f"worker{place}", _with_tensors(parts)) for place, parts in enumerate(states))

    def load(self, pool: Pool, env_ids: Sequence[int], state: Mapping[str, Any], *, strict: bool) -> None:
        """Give some envs a state, as `read` returns it; or one env's state to all of them.

        Raises:
            UsageError: envs or parts are missing, or too many (only if `strict`). No env is given anything then.
            EnvError: an env refused its state.
        """
        if not state:
            return  # what a collector saves of an env that it does not know to have a state
        is_of_one = not any(_WORKER.fullmatch(str(key)) for key in state)
        rows = [state] * len(env_ids) if is_of_one else _rows(state, len(env_ids), strict=strict)
        given = {env_id: _with_arrays(parts) for env_id, parts in zip(env_ids, rows, strict=True) if parts is not None}
        ids = list(given)
        if strict:
            for env_id, names in zip(ids, pool.get_attr(part_names, env_ids=ids), strict=True):
                _check_names(env_id, names, given[env_id])
        is_common = is_of_one and len(ids) == pool.num_envs
        names = list(dict.fromkeys(name for parts in given.values() for name in parts))
        for name in names:
            values = {env_id: parts[name] for env_id, parts in given.items() if name in parts}
            if is_common:
                self._own.pop(name, None)
                self._common[name] = next(iter(values.values()))
            else:
                self._own.setdefault(name, {}).update(values)
        self._set(pool, names, ids, is_common=is_common)

    def load_again(self, pool: Pool) -> None:
        """Give another pool's envs what was loaded last, part by part."""
        self._set(pool, list(self._common), (), is_common=True)
        for name, values in self._own.items():
            self._set(pool, [name], list(values), is_common=False)

    def _set(self, pool: Pool, names: Sequence[str], env_ids: Sequence[int], *, is_common: bool) -> None:
        """Give envs what is remembered for them; all parts, even if one is refused."""
        errors: list[StepmillError] = []
        for name in names:
            setter = self._setters.setdefault(name, partial(load_part, name))
            try:
                if is_common:
                    pool.set_attr(setter, {name: self._common[name]})  # without env_ids: spares, too
                    continue
                values = self._own[name]
                ids = [env_id for env_id in env_ids if env_id in values]
                pool.set_attr(setter, [{name: values[env_id]} for env_id in ids], env_ids=ids)
            except EnvError as error:
                errors.append(error)
        if errors:
            raise join_errors(errors)


def _rows(state: Mapping[str, Any], num: int, *, strict: bool) -> list[Any]:
    names = [f"worker{place}" for place in range(num)]
    missing = [name for name in names if name not in state]
    unexpected = sorted(set(state) - set(names), key=str)
    if strict and (missing or unexpected):
        raise UsageError(
            f"the state dict does not fit {num} envs: missing {missing}, unexpected {unexpected}; give one entry per env, "
            "or the state of one env for all, or strict=False"
        )
    return [state.get(name) for name in names]


def _check_names(env_id: int, names: Sequence[str], parts: Parts) -> None:
    missing, unexpected = sorted(set(names) - set(parts)), sorted(set(parts) - set(names), key=str)
    if missing or unexpected:
        raise UsageError(
            f"the state does not fit env {env_id}: missing {missing}, unexpected {unexpected}; make the env as it was when "
            "the state was saved, or load with strict=False"
        )


def _with_tensors(parts: Parts) -> OrderedDict[str, Any]:
    """Return running statistics as tensors, which `torch.load` reads without trust; what envs say themselves as it is."""
    return OrderedDict(
        (name, {key: torch.as_tensor(np.asarray(value)) for key, value in own.items()} if is_statistics(name) else own)
        for name, own in parts.items()
    )


def _with_arrays(parts: Any) -> Parts:
    if not isinstance(parts, Mapping):
        raise UsageError(f"the state of an env is a dict by part, not a {type(parts).__name__}; see state_dict()")
    return {
        name: {key: _array(value) for key, value in own.items()} if is_statistics(name) else copy.deepcopy(own)
        for name, own in parts.items()
    }


def _array(value: Any) -> Any:
    """Return an array of its own, or a number for a tensor without dimensions: workers need no torch to read it."""
    array = np.array(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)
    return array if array.ndim else array.item()
