"""`States`: reads and loads the state of running envs, for `state_dict` and `load_state_dict`.

    {"worker0": {"NormalizeObservation.obs_rms": {"mean": tensor, ...}, "MyEnv": the result of MyEnv.state_dict()},
     "worker1": ...}

There is an entry per env, which is empty if the env has no state. `env_state.py` describes the parts of an entry.
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

from stepmill.frontends.torchrl.env_state import Parts, is_statistics, load_part, part_names, read_parts
from stepmill.pool.pool import Pool
from stepmill.spec.errors import EnvError, StepmillError, UsageError, join_errors

_WORKER = re.compile(r"worker\d+")


class States:
    """Reads and loads the state of a pool's envs, and loads it again into rebuilt envs.

    When an env is rebuilt, its state is loaded again before its first reset: by the pool, if a worker was restarted,
    and by `load_again`, if the pool was replaced. Each part is set by a separate call, so that the pool stores the
    parts separately.
    """

    def __init__(self) -> None:
        # By part, one function for the life of this object: the pool identifies a stored setting by its function.
        self._setters: dict[str, Callable[[Any, Any], object]] = {}
        self._common: dict[str, Any] = {}  # by part, the state that was loaded into all envs and spares
        self._own: dict[str, dict[int, Any]] = {}  # by part and env, the states that were loaded into some envs later

    def read(self, pool: Pool, env_ids: Sequence[int]) -> OrderedDict[str, Any]:
        """Return the state of some envs, "worker0" for the first of them. Tensors are new and on the CPU."""
        states = pool.get_attr(read_parts, env_ids=env_ids)
        return OrderedDict((f"worker{place}", _with_tensors(parts)) for place, parts in enumerate(states))

    def load(self, pool: Pool, env_ids: Sequence[int], state: Mapping[str, Any], *, strict: bool) -> None:
        """Load a state into some envs: what `read` returned, or the state of one env for all of them.

        Raises:
            UsageError: with `strict`, envs or parts are missing or unknown. Nothing is loaded.
            EnvError: an env raised while it loaded its state.
        """
        if state == {}:
            return  # a collector saves this for an env class that it does not know
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
        """Load the stored states into the envs of a new pool."""
        self._set(pool, list(self._common), (), is_common=True)
        for name, values in self._own.items():
            self._set(pool, [name], list(values), is_common=False)

    def _set(self, pool: Pool, names: Sequence[str], env_ids: Sequence[int], *, is_common: bool) -> None:
        """Load the stored states of these parts into envs; an error of one part does not stop the others."""
        errors: list[StepmillError] = []
        for name in names:
            setter = self._setters.setdefault(name, partial(load_part, name))
            try:
                if is_common:
                    pool.set_attr(setter, {name: self._common[name]})  # without env_ids it is also set on spares
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
            f"the state dict is not one of {num} envs: missing {missing}, unexpected {unexpected}; give one entry per env, "
            "or the state of one env for all, or strict=False"
        )
    return [state.get(name) for name in names]


def _check_names(env_id: int, names: Sequence[str], parts: Parts) -> None:
    missing, unexpected = sorted(set(names) - set(parts)), sorted(set(parts) - set(names), key=str)
    if missing or unexpected:
        raise UsageError(
            f"the state is not one of env {env_id}: missing {missing}, unexpected {unexpected}; make the env with the same "
            "wrappers as when the state was saved, or load with strict=False"
        )


def _with_tensors(parts: Parts) -> OrderedDict[str, Any]:
    """Return running statistics as tensors, which `torch.load(weights_only=True)` accepts; other parts are not changed."""
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
    """Return a new array, or a number for a tensor without dimensions, which workers can read without torch."""
    array = np.array(value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value)
    return array if array.ndim else array.item()
