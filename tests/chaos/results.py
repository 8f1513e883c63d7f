"""Converts what a pool delivers for the checks: one result per row of a batch, and the envs that an error names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepmill.spec.batch import Batch
from stepmill.spec.errors import StepmillError

Numbers = tuple[int | float, ...]


@dataclass(frozen=True)
class Result:
    """One row of a batch.

    Attributes:
        fault: the kind of the fault in `info`; None if there is none.
        why: the whole fault entry, as text.
        at: the columns of the observation that the info repeats.
        final_obs, final_at: with SAME_STEP, those of the episode that ended.
        episode: return and length of an episode that ended.
        omitted: env and leaf of each value of the info that could not be read.
    """

    row: int
    obs: NDArray[np.int64]
    reward: float
    terminated: bool
    truncated: bool
    fault: str | None
    why: str = ""
    at: Numbers | None = None
    final_obs: NDArray[np.int64] | None = None
    final_at: Numbers | None = None
    episode: Numbers | None = None
    omitted: tuple[tuple[int | None, str], ...] = ()


def _entry(info: Mapping[str, Any], key: str, i: int) -> Any:
    """Return the value of row `i` under a key of a merged info; None if the row has none."""
    mask = info.get(f"_{key}")
    if mask is None or not mask[i]:
        return None
    values = info[key]
    return {name: values[name][i] for name in values if name[0] != "_"} if isinstance(values, dict) else values[i]


def results_of(batch: Batch, rows_each: int) -> Iterator[Result]:
    """Yield one result per row of a batch."""
    info: Mapping[str, Any] = batch.info
    finals: Mapping[str, Any] = info.get("final_info", {})
    for i in range(len(batch.env_id)):
        final_obs, episode = _entry(info, "final_obs", i), _entry(info, "episode", i)
        fault = _entry(info, "fault", i) or _entry(finals, "fault", i)
        at, final_at = _entry(info, "at", i), _entry(finals, "at", i)
        yield Result(
            int(batch.env_id[i]) * rows_each + i % rows_each,
            np.array(batch.obs[i]),
            float(batch.reward[i]),
            bool(batch.terminated[i]),
            bool(batch.truncated[i]),
            str(fault["kind"]) if fault else None,
            str(fault) if fault else "",
            None if at is None else tuple(at.tolist()),
            None if final_obs is None else np.array(final_obs),
            None if final_at is None else tuple(final_at.tolist()),
            None if episode is None else (float(episode["r"]), int(episode["l"])),
            tuple((error.env_id, error.leaf) for error in _entry(info, "omitted", i) or ()),
        )


def named_in(error: StepmillError) -> set[int]:
    """Return the envs that an error names, and those that the errors in its `others` name."""

    def each(one: StepmillError) -> Iterator[int]:
        yield from getattr(one, "env_ids", ())
        env_id = getattr(one, "env_id", None)
        if env_id is not None:
            yield env_id

    return {env_id for one in (error, *getattr(error, "others", ())) for env_id in each(one)}
