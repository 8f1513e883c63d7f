"""`save` and `restore`: the running envs of a program, in a file or in memory. They use `Pool` and its port only."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stepmill import StepmillError, UsageError
from stepmill.pool.pool import Pool
from stepmill.pool.port import PoolPort, SavedEnvs, StateFunctions, read_saved, write_saved

EnvIds: TypeAlias = "Sequence[int] | NDArray[np.integer[Any]]"

_HOLDERS = ("_pool", "pool", "_engine", "_port", "env", "venv", "envs")  # attributes that lead to the pool
_SPACES = ("observation_space", "action_space", "single_observation_space", "single_action_space")


def save(
    envs: Any,
    path: str | os.PathLike[str] | None,
    *,
    env_ids: EnvIds | None = None,
    state: StateFunctions | None = None,
) -> SavedEnvs:
    """Save running envs, in the middle of their episodes. The envs are not changed.

    With the same functions and options, `restore` makes new envs go on exactly as these would. For each env the cheapest way is
    used: the memory of a kernel is copied; `state` reads and sets the state of a simulator that can copy itself; else the seed and
    the actions of the episode are saved, and the episode is replayed. This needs on_fault="replay" and seeding="per_episode".

    Args:
        envs: a `Pool`, `VectorEnv`, `SB3VecEnv`, `Rollout`, `AsyncPool`, ALF's `FastParallelEnvironment`, PettingZoo's, Tianshou's or
            TorchRL's classes, also in wrappers of Gymnasium or SB3. The states of wrappers, such as averages, are not saved. Others
            are refused: the managers of DI-engine and ML-Agents and actorcritic's `MultiEnv` have a state of their own per env.
        path: the file to write. It is replaced as a whole, or not at all. None writes none.
        env_ids: which envs; None is all. What belongs to the whole pool, such as spares, is only saved with all.
        state: (get_state, set_state), which run in the workers. `get_state(env)` returns the whole state of an env and its
            wrappers, and `set_state(env, state)` sets it on an env that has been reset.
    Returns:
        the saved envs, a value that can be pickled. Its `how` says for each env which way is used.
    Raises:
        UsageError: an env cannot be saved; the text names it, and says what to do.
        BusyEnvError: an env has a fault that was not received; or it is stepping, and its state would be copied.
        OSError: the file cannot be written. A file that was there before is not changed.
    """
    pool, front_end = _find_pool(envs)
    own = {name: copy(getattr(front_end, name)) for name in getattr(front_end, "_own_names", tuple)()}
    saved = PoolPort(pool).positions.save(env_ids, state)
    spaces = {path: _generator(space) for path, space in _spaces_of(envs)}
    saved = replace(saved, front_end={"spaces": spaces, "own": own})
    if path is not None:
        write_saved(os.fspath(path), saved)
    return saved


def restore(
    envs: Any,
    source: str | os.PathLike[str] | SavedEnvs,
    *,
    env_ids: EnvIds | None = None,
    state: StateFunctions | None = None,
    strict: bool = True,
    trust: bool = False,
) -> Any:
    """Make envs go on where others were saved. The number of workers, the backend and the packing may be different.

    Replays run on all workers at once. Each result is compared with the first one.

    Args:
        envs: envs made with the same functions and options as those that were saved. They need no reset before.
        source: the path of a file that `save` wrote, or the value that it returned.
        env_ids: the envs that get the saved positions, one for each saved env; one saved env may be given to many envs. None
            is those that were saved.
        state: the same functions as for `save`.
        strict: whether an env whose replay gives another result is an error. If not, its next step is truncated, with
            `info["fault"]`, and it begins a new episode.
        trust: whether pickled parts of a file are loaded, which can run any code that is in the file.
    Returns:
        what the last `step` returned before all envs were saved, in the form of the front-end (TorchRL's: of `reset`). Envs that
        were stepping have their newest observation in it. For some envs, only their observations are returned.
    Raises:
        UsageError: the file is damaged, has another version, or needs `trust`; or the positions do not fit these envs. No env is
            changed. If a replay gives another result, other envs have been restored.
        BusyEnvError: an env is stepping, or has a result to be received. No env is changed.
        WorkerDied, EnvError, EnvTimeout: an env had a fault, and its worker could not be restarted.
    """
    saved = source if isinstance(source, SavedEnvs) else read_saved(os.fspath(source), trust=trust)
    pool, front_end = _find_pool(envs)
    port, own_names = PoolPort(pool), set(getattr(front_end, "_own_names", tuple)())
    try:
        ids = port.positions.restore(saved, env_ids, state, strict=strict)
        spaces = saved.front_end.get("spaces", {})
        for name, space in _spaces_of(envs):
            if spaces.get(name) is not None:
                space.np_random.bit_generator.state = spaces[name]
        is_whole = env_ids is None and saved.whole.get("batch") is not None
        for name in own_names.intersection(saved.front_end.get("own", ()) if is_whole else ()):
            setattr(front_end, name, copy(saved.front_end["own"][name]))
        batch = port.positions.newest_batch() if is_whole or front_end is not None else None
    except StepmillError:
        raise
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:  # only if the file was forged
        raise UsageError(f"the saved envs are damaged: {exc!r}; give an unchanged file") from exc
    returned = batch if front_end is None or batch is None else front_end._as_returned(batch)
    return returned if is_whole else port.observe(ids)


def _find_pool(envs: Any) -> tuple[Pool, Any]:
    """Return the pool of a front-end, which may be in wrappers, and the front-end; None for a pool.

    A front-end has `_as_returned`. Those whose own memory does not follow from the newest results have `_own_names`, which returns the
    names of these attributes.
    """
    found, front_end = envs, None
    for _ in range(100):
        if found is None or isinstance(found, Pool):
            break
        front_end = found if front_end is None and hasattr(type(found), "_as_returned") else front_end
        inner = (getattr(found, "__dict__", {}).get(name) for name in _HOLDERS)
        found = next((each for each in inner if each is not None), None)
    is_own = type(envs).__module__.startswith("stepmill.") and envs is not found
    if not isinstance(found, Pool) or (is_own and front_end is None):
        raise UsageError(
            f"a {type(envs).__name__} has no pool that can be saved; give a Pool, or a front-end that `stepmill.save` names, and "
            "that is open"
        )
    return found, front_end


# ---- generators of spaces --------------------------------------------------------------------------------------------------


def _spaces_of(envs: Any) -> Iterator[tuple[str, Any]]:
    """Yield the spaces of a front-end whose generators were used, with their parts and a name for each."""
    for name in _SPACES:
        with suppress(AttributeError, UsageError):
            yield from _parts(name, getattr(envs, name))


def _parts(name: str, space: Any) -> Iterator[tuple[str, Any]]:
    yield name, space
    inner = getattr(space, "spaces", ())
    for key, part in inner.items() if isinstance(inner, Mapping) else enumerate(inner):
        yield from _parts(f"{name}.{key}", part)


def _generator(space: Any) -> Any:
    generator = getattr(space, "_np_random", None)  # np_random would seed one that was not used
    return None if generator is None else generator.bit_generator.state
