"""Plans resets: turns the seeds, options and masks of a call into commands for envs."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import numpy as np
from numpy.typing import NDArray

from stepmill import _native
from stepmill.pool.arguments import checked_ids
from stepmill.spec.errors import UsageError

Seed = int | Sequence[int | None] | Mapping[int, int | None] | None
Options = Mapping[Any, Any] | Sequence[Mapping[str, Any] | None] | None
LARGEST_WORD = 2**64 - 1  # larger seeds are sent in blobs
Blob = tuple[object, object, None]  # (seed, options, no actions)


@dataclass(frozen=True)
class ResetPlan:
    """The resets of one call: a seed word and a blob for each env, each of which may be None.

    Attributes:
        options: for each env, the options that the call gave it, which may be None.
        is_whole: whether all rows of all envs are reset. The spares are then reset too, with `spare_seeds`.
    """

    env_ids: list[int]
    options: dict[int, Mapping[str, Any] | None]
    words: list[int | None]
    blobs: list[Blob | None]
    is_whole: bool
    spare_seeds: list[int | None]

    def without(self, env_ids: Collection[int]) -> ResetPlan:
        """Return the plan without these envs."""
        if not {*env_ids} & {*self.env_ids}:
            return self
        rows = [row for row, env_id in enumerate(self.env_ids) if env_id not in env_ids]
        ids = [self.env_ids[row] for row in rows]
        options = {env_id: own for env_id, own in self.options.items() if env_id not in env_ids}
        words, blobs = [self.words[row] for row in rows], [self.blobs[row] for row in rows]
        return replace(self, env_ids=ids, options=options, words=words, blobs=blobs, is_whole=False)

    @property
    def env_ids_to_reset(self) -> list[int]:
        """The envs that cannot use an episode that was begun in advance."""
        rows = zip(self.env_ids, self.words, self.blobs, strict=True)
        return [env_id for env_id, word, blob in rows if self.is_whole or word is not None or blob is not None]

    def options_with_spares(self, num_spares: int) -> dict[int, Mapping[str, Any] | None]:
        """Return `options`. If all envs have the same options, the result has them for the spares, too."""
        if not self.is_whole or any(own is not self.options.get(0) for own in self.options.values()):
            return self.options
        num_envs = len(self.env_ids)
        return self.options | dict.fromkeys(range(num_envs, num_envs + num_spares), self.options.get(0))

    def release_staged(self, state: _native.PoolState) -> None:
        """Before a reset of all envs, give each env its own object again. Staged episodes become results to be dropped."""
        state.release_staged(self.env_ids_to_reset, is_whole=self.is_whole)


class ResetPlanner:
    """Plans resets. It stores only which envs have no seed yet."""

    def __init__(self, num_envs: int, batch_size: int, *, is_seeded: bool, num_spares: int = 0) -> None:
        """`is_seeded` says whether each env needs a seed, from which the seeds of its automatic resets are derived."""
        self._num_envs = num_envs
        self._batch_size = batch_size
        self._num_spares = num_spares
        self.unseeded = set(range(num_envs)) if is_seeded else set()

    def plan(
        self, env_ids: Sequence[int] | NDArray[Any] | None, mask: NDArray[np.bool_] | None, seed: Seed, options: Options
    ) -> ResetPlan:
        """Return the plan of a reset; see `Pool.reset_async`."""
        if env_ids is not None and mask is not None:
            raise UsageError("a reset takes env_ids or a mask, not both")
        rows = None if mask is None else self._rows(mask)
        ids = self._ids(env_ids, rows)
        seed, spare_seeds = self._split_seed(seed)
        seeds = spread_seed(seed, ids, self._num_envs, self._batch_size)
        for place, env_id in enumerate(ids):
            if env_id in self.unseeded:
                seeds[place] = draw_seed() if seeds[place] is None else seeds[place]
        each = spread_options(options, ids, self._num_envs)
        words, blobs = split_words(seeds, each)
        if rows is not None and self._batch_size > 1:
            blobs = [_with_mask(blob, rows[env_id]) for blob, env_id in zip(blobs, ids, strict=True)]
        by_env = dict(zip(ids, each, strict=True))
        if _is_each(options):
            by_env = {env_id: own for env_id, own in by_env.items() if env_id in options}
        is_whole = len(ids) == self._num_envs and (rows is None or bool(rows.all()))
        return ResetPlan(ids, by_env, words, blobs, is_whole, spare_seeds)

    def _split_seed(self, seed: Seed) -> tuple[Seed, list[int | None]]:
        """Return the seeds of envs and of spares. A list may have one more seed for each spare."""
        none: list[int | None] = [None] * self._num_spares
        if self._num_spares == 0 or seed is None or isinstance(seed, (Mapping, str, bytes)):
            return seed, none
        if isinstance(seed, (Sequence, np.ndarray)):
            num_rows = self._num_envs * self._batch_size
            if len(seed) == num_rows + self._num_spares * self._batch_size:
                return seed[:num_rows], [_checked(each) for each in seed[num_rows :: self._batch_size]]
            return seed, [_derived_seed(seed, place) for place in range(self._num_spares)]
        first = _checked(seed) or 0
        return seed, [
            (first + (self._num_envs + place) * self._batch_size) & LARGEST_WORD for place in range(self._num_spares)
        ]

    def record_sent(self, plan: ResetPlan) -> None:
        """Record that a plan was sent, so its envs have seeds."""
        self.unseeded.difference_update(plan.env_ids)

    def _rows(self, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
        rows = np.asarray(mask)
        wanted = self._num_envs * self._batch_size
        if rows.dtype != np.bool_ or rows.shape != (wanted,):
            raise UsageError(
                f"the reset mask has shape {rows.shape} and dtype {rows.dtype}; give {wanted} bools, one per row"
            )
        return rows.reshape(self._num_envs, self._batch_size)

    def _ids(self, env_ids: Sequence[int] | NDArray[Any] | None, rows: NDArray[np.bool_] | None) -> list[int]:
        if rows is not None:
            return [int(env_id) for env_id in np.flatnonzero(rows.any(axis=1))]
        if env_ids is None:
            return list(range(self._num_envs))
        return checked_ids(env_ids, self._num_envs)


def _with_mask(blob: Blob | None, rows: NDArray[np.bool_]) -> Blob | None:
    if rows.all():
        return blob
    seed, options, _ = blob or (None, None, None)
    given = dict(options) if isinstance(options, Mapping) else {}
    return (seed, {**given, "reset_mask": rows.copy()}, None)


def spread_seed(
    seed: Seed, env_ids: Sequence[int], num_envs: int, batch_size: int
) -> list[int | list[int | None] | None]:
    """Return each env's own seed, in the order of `env_ids`.

    Args:
        seed: None; a number s, which gives row i the seed s + i; a list with a seed or None for every row of the pool,
            or of the envs `env_ids`; or a dict from env id to seed.
        env_ids: the envs to reset.
        num_envs: the number of envs of the pool.
        batch_size: the number of rows of an env. A batched env gets the seed of its first row, or a list with one seed
            per row.
    """
    if seed is None:
        return [None] * len(env_ids)
    if isinstance(seed, Mapping):
        unknown = sorted(set(seed) - set(env_ids))
        if unknown:
            raise UsageError(f"got seeds for envs {unknown}, which this call does not reset; name them in env_ids")
        return [_checked(seed.get(env_id)) for env_id in env_ids]
    if isinstance(seed, (Sequence, np.ndarray)) and not isinstance(seed, (str, bytes)):
        return _from_list(seed, env_ids, num_envs, batch_size)
    first = _checked(seed)
    return [None if first is None else first + env_id * batch_size for env_id in env_ids]


def _from_list(
    seeds: Sequence[int | None], env_ids: Sequence[int], num_envs: int, batch_size: int
) -> list[int | list[int | None] | None]:
    num = len(seeds)
    if num == num_envs * batch_size:
        places = list(env_ids)
    elif num == len(env_ids) * batch_size:
        places = list(range(len(env_ids)))
    else:
        raise UsageError(f"got {num} seeds for {num_envs * batch_size} envs; give one per env, or one number for all")
    checked = [_checked(seed) for seed in seeds]
    if batch_size == 1:
        return [checked[place] for place in places]
    return [checked[place * batch_size : (place + 1) * batch_size] for place in places]


def spread_options(options: Options, env_ids: Sequence[int], num_envs: int) -> list[Mapping[str, Any] | None]:
    """Return each env's own options, in the order of `env_ids`.

    Args:
        options: None; a mapping for all envs; a list with a mapping or None for every env of the pool, or for each of
            the envs `env_ids`; or a dict from env id to mapping. A dict whose keys are all integers is such a dict.
        env_ids: the envs to reset.
        num_envs: the number of envs of the pool.
    """
    if options is None or isinstance(options, Mapping):
        if not _is_each(options):
            return [options] * len(env_ids)
        unknown = sorted(int(key) for key in set(options) - set(env_ids))
        if unknown:
            raise UsageError(f"got options for envs {unknown}, which this call does not reset; name them in env_ids")
        return [_checked_options(options.get(env_id)) for env_id in env_ids]
    if not isinstance(options, (list, tuple)):
        raise UsageError(
            f"reset options must be a mapping, one mapping per env, or None, not a {type(options).__name__}"
        )
    if len(options) not in (num_envs, len(env_ids)):
        raise UsageError(
            f"got {len(options)} options for {len(env_ids)} envs; give one per env, or one mapping for all"
        )
    places = env_ids if len(options) == num_envs else range(len(env_ids))
    return [_checked_options(options[place]) for place in places]


def _is_each(options: object) -> TypeGuard[Mapping[int, Any]]:
    """Return whether options are a dict from env id to the options of that env."""
    return (
        isinstance(options, Mapping)
        and bool(options)
        and all(isinstance(key, (int, np.integer)) and not isinstance(key, bool) for key in options)
    )


def _checked_options(options: object) -> Mapping[str, Any] | None:
    if options is None or isinstance(options, Mapping):
        return options
    raise UsageError(f"the options of one env must be a mapping or None, not the {type(options).__name__} {options!r}")


def _derived_seed(seeds: Sequence[int | None], place: int) -> int | None:
    """Return the seed of a spare for which a list has no seed. It is derived from the first seed."""
    first = _checked(seeds[0]) if len(seeds) else None
    return None if first is None else int(np.random.SeedSequence([first, place]).generate_state(1)[0]) >> 1


def _checked(seed: object) -> int | None:
    if seed is None:
        return None
    try:
        number = None if isinstance(seed, bool) else operator.index(seed)  # type: ignore[arg-type]  # the call is the check
    except TypeError:
        number = None
    if number is None or number < 0:
        raise UsageError(f"the seed {seed!r} is not an integer of 0 or more; give an int, a list of ints, or None")
    return number


def split_words(
    seeds: Sequence[int | list[int | None] | None], options: Sequence[object]
) -> tuple[list[int | None], list[Blob | None]]:
    """Return the seed words, and a blob (seed, options, no actions) for each env whose seed or options need one."""
    words: list[int | None] = []
    blobs: list[Blob | None] = []
    for seed, own in zip(seeds, options, strict=True):
        word = seed if isinstance(seed, int) and seed <= LARGEST_WORD else None
        words.append(word)
        extra = seed if word is None else None
        blobs.append(None if extra is None and own is None else (extra, own, None))
    return words, blobs


def draw_seed() -> int:
    """Return a random seed that is small enough that seed + env_id is valid in every env API."""
    return int(np.random.SeedSequence().generate_state(1)[0]) >> 2
