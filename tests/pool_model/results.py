"""Rows of a batch as plain Python values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import stepmill
from stepmill.spec.errors import StepmillError
from tests.pool_model.envs import AGENTS


@dataclass
class Result:
    """One row: what the model predicts, and what a pool returns.

    Attributes:
        fault: the entry of the info, of the final one with SAME_STEP.
        episode: return and length.
        omitted: env and leaf of each value of the info that could not be read.
    """

    obs: tuple[int, ...]
    reward: float
    ends: tuple[bool, bool]
    info: dict[str, Any] = field(default_factory=dict)
    final_obs: tuple[int, ...] | None = None
    final_info: dict[str, Any] | None = None
    fault: dict[str, Any] | None = None
    episode: tuple[float, int] | None = None
    omitted: tuple[tuple[int | None, str], ...] = ()


class WrongError(AssertionError):
    """A pool does not do what the model says."""


def require(condition: object, text: str) -> None:
    if not condition:
        raise WrongError(text)


def same(result: Result, wanted: Result, text: str) -> None:
    if result != wanted:
        raise WrongError(f"{text} is\n  {result}, not\n  {wanted}")


def rows_of(batch: stepmill.Batch) -> Iterator[tuple[int, Result]]:
    """Yield env id and result of each row."""
    for row, env_id in enumerate(batch.env_id.tolist()):
        info = _own(batch.info, row)
        final_obs, final_info, episode, omitted = (
            info.pop(key, None) for key in ("final_obs", "final_info", "episode", "omitted")
        )
        result = Result(
            _obs_of(batch.obs, row),
            _first(batch.reward[row]),
            (bool(_same(batch.terminated[row])), bool(_same(batch.truncated[row]))),
            _of_agent(info),
            None if final_obs is None else _obs_of(final_obs, None),
            None if final_info is None else _of_agent(final_info),
            episode=None if episode is None else (_first(episode["r"], step=episode["l"]), int(episode["l"])),
            omitted=tuple((error.env_id, error.leaf) for error in omitted or ()),
        )
        result.fault = (result.info if result.final_info is None else result.final_info).pop("fault", None)
        yield env_id, result


def _own(info: Mapping[str, Any], row: int) -> dict[str, Any]:
    """Return the info of one row of merged infos."""
    own = {}
    for key, values in info.items():
        mask = info.get(f"_{key}")
        if key[0] == "_" or (mask is not None and not mask[row]):
            continue
        own[key] = _own(values, row) if isinstance(values, dict) else _plain(values[row])
    return own


def _plain(value: Any) -> Any:
    return (
        value.tolist() if isinstance(value, (np.ndarray, np.generic)) and np.asarray(value).dtype != object else value
    )


def _of_agent(info: dict[str, Any]) -> dict[str, Any]:
    """Return the info of the first agent, and "fault", in one dict."""
    return {**{key: value for key, value in info.items() if key != AGENTS[0]}, **info.get(AGENTS[0], {})}


def _obs_of(obs: Any, row: int | None) -> tuple[int, ...]:
    """Return an observation; those of two agents must differ by one."""
    if not isinstance(obs, dict):
        return tuple(np.asarray(obs if row is None else obs[row]).tolist())
    first, second = (np.asarray(obs[agent] if row is None else obs[agent][row]) for agent in AGENTS)
    assert (second - first == 1).all(), f"agents observe {first} and {second}"
    return tuple(first.tolist())


def _first(values: Any, step: int = 1) -> float:
    """Return a reward or return; those of two agents must differ by one in each step, or be zero."""
    values = np.atleast_1d(np.asarray(values))
    if len(values) == len(AGENTS):
        assert values[1] - values[0] == step or not values.any(), f"agents have rewards {values}"
    return float(values[0])


def _same(flags: Any) -> Any:
    flags = np.atleast_1d(flags)
    assert (flags == flags[0]).all(), f"agents have flags {flags}"
    return flags[0]


def named_in(error: StepmillError) -> set[int]:
    """Return the envs that an error names, and those that the errors in its `others` name."""

    def each(one: StepmillError) -> Iterator[int]:
        yield from getattr(one, "env_ids", ())
        env_id = getattr(one, "env_id", None)
        if env_id is not None:
            yield env_id

    return {env_id for one in (error, *getattr(error, "others", ())) for env_id in each(one)}
