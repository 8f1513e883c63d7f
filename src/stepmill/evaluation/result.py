"""The results of an evaluation: a row per episode, and means with confidence intervals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import StringIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

Interval = tuple[float, float]
_Z = 1.959963984540054  # the quantile of the normal distribution for 95 % intervals
_NUM_RESAMPLES = 2000
# The formats of the fields of a Summary in a table.
_FORMATS = ("{}", "{}", "{:.4g}", "{:.4g} to {:.4g}", "{:.1f}", "{:.1%}", "{:.1%} to {:.1%}")
_CHUNK = 1 << 22  # drawn indices that are in memory at once


@dataclass(frozen=True)
class Episode:
    """The results of one episode. If it could not be played, `fault` says why, and return, length and success are None.

    Attributes:
        task: the name of the task; None without tasks.
        seed: the seed that the env's `reset` got.
        episode_return: the sum of the rewards.
        length: the number of steps.
        success: whether the env was successful; None if the env does not say.
        wall_s: the seconds from the command for its reset to its last step.
        fault: the error of the last attempt.
        attempts: how often it was begun; 1 without faults.
        infos: the infos of the last step that the option `infos` names.
    """

    task: str | None
    seed: int
    episode_return: float | None = None
    length: int | None = None
    success: bool | None = None
    wall_s: float = 0.0
    fault: str | None = None
    attempts: int = 1
    infos: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Means of some episodes, with 95 % confidence intervals. Episodes with a fault are counted only in `num_failed`.

    Attributes:
        num_episodes: the number of episodes that were played to their end.
        num_failed: the number of episodes that could not be played.
        mean_return, mean_length: the means over these episodes; None without episodes.
        return_interval: the interval of the mean return, by the percentile bootstrap with 2,000 resamples and a fixed seed.
        success_rate: the share of successful episodes; None if the env does not say for all of them.
        success_interval: the interval of the success rate, as by Wilson (1927).
    """

    num_episodes: int
    num_failed: int
    mean_return: float | None
    return_interval: Interval | None
    mean_length: float | None
    success_rate: float | None
    success_interval: Interval | None


@dataclass(frozen=True)
class Evaluation:
    """The result of `stepmill.evaluate`. It prints as a table.

    Attributes:
        env: the name of the env.
        episodes: all episodes, by task and then by seed, in the order in which these were given.
        elapsed_s: the duration of this run in seconds.
    """

    env: str
    episodes: tuple[Episode, ...]
    elapsed_s: float

    @cached_property
    def summary(self) -> Summary:
        """Means of all episodes."""
        return summarise(self.episodes)

    @cached_property
    def by_task(self) -> dict[str, Summary]:
        """Means for each task, by name; empty without tasks."""
        groups = groupby(self.episodes, lambda episode: episode.task)
        return {task: summarise([*episodes]) for task, episodes in groups if task is not None}

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row per episode and a column per info.

        The column of an info is "info_NAME" if a field has its name. This needs pandas.
        """
        import pandas as pd

        rows = [asdict(episode) for episode in self.episodes]
        for row in rows:
            infos = row.pop("infos")
            row |= {f"info_{name}" if name in row else name: value for name, value in infos.items()}
        return pd.DataFrame(rows)

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the results as a JSON document, and write it to `path` if that is given. NaN and infinities become null."""
        by_task = {name: asdict(summary) for name, summary in self.by_task.items()}
        document = {**asdict(self), "summary": asdict(self.summary), "by_task": by_task}
        text = dump_json(document, is_strict=True)
        if path is not None:
            Path(path).write_text(f"{text}\n", encoding="utf-8")
        return text

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table(title=f"{self.env}: {len(self.episodes)} episodes in {self.elapsed_s:.1f} s")
        for heading in ("task", "episodes", "failed", "return", "95 %", "length", "success", "95 %"):
            table.add_column(heading, justify="left" if heading == "task" else "right")
        for name, summary in (*self.by_task.items(), ("all", self.summary)):
            values = zip(_FORMATS, asdict(summary).values(), strict=True)
            cells = ["–" if value is None else form.format(*np.atleast_1d(value)) for form, value in values]
            table.add_row(name, *cells)
        text = StringIO()
        Console(file=text, width=110, markup=False, highlight=False, emoji=False).print(table)
        faults = [f"{each.task or ''} seed {each.seed}: {each.fault}".strip() for each in self.episodes if each.fault]
        more = [f"and {len(faults) - 3} more, in `episodes`"] * (len(faults) > 3)
        return "\n".join([text.getvalue().rstrip(), *faults[:3], *more])


def summarise(episodes: Sequence[Episode]) -> Summary:
    """Return the means of some episodes."""
    played = [episode for episode in episodes if episode.fault is None]
    returns = np.array([episode.episode_return for episode in played], np.float64)
    successes = [episode.success for episode in played]
    is_known = bool(played) and None not in successes
    num_successes = sum(map(bool, successes))
    return Summary(
        num_episodes=len(played),
        num_failed=len(episodes) - len(played),
        mean_return=float(returns.mean()) if played else None,
        return_interval=bootstrap_interval(returns) if played else None,
        mean_length=float(np.mean([episode.length for episode in played])) if played else None,
        success_rate=num_successes / len(played) if is_known else None,
        success_interval=wilson_interval(num_successes, len(played)) if is_known else None,
    )


def bootstrap_interval(values: np.ndarray[Any, np.dtype[np.float64]]) -> Interval:
    """Return the interval that contains 95 % of the means of resamples of values [n], n > 0."""
    random, num = np.random.default_rng(0), len(values)
    rows = min(max(1, _CHUNK // num), _NUM_RESAMPLES)
    means = [values[random.integers(num, size=(rows, num))].mean(axis=1) for _ in range(0, _NUM_RESAMPLES, rows)]
    low, high = np.quantile(np.concatenate(means)[:_NUM_RESAMPLES], [0.025, 0.975])
    return float(low), float(high)


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """Return Wilson's interval of a share, which stays within 0 and 1 even if all trials have the same result."""
    share, z2 = num_successes / num_trials, _Z**2
    middle = share + z2 / (2 * num_trials)
    width = _Z * (share * (1 - share) / num_trials + z2 / (4 * num_trials**2)) ** 0.5
    low, high = ((middle + sign * width) / (1 + z2 / num_trials) for sign in (-1, 1))
    return max(0.0, low), min(1.0, high)


def dump_json(value: object, *, is_strict: bool = False) -> str:
    """Return JSON on one line. Arrays become lists, and values and keys that JSON does not know become their texts.

    With `is_strict`, NaN and infinities become null. Otherwise they are written as Python reads them.
    """
    return json.dumps(_plain(value, is_strict=is_strict), allow_nan=not is_strict)


def _plain(value: Any, *, is_strict: bool) -> object:
    if isinstance(value, dict):
        is_kept = (str, int, type(None)) if is_strict else (str, int, float, type(None))
        return {
            key if isinstance(key, is_kept) else str(key): _plain(child, is_strict=is_strict)
            for key, child in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_plain(child, is_strict=is_strict) for child in value]
    if isinstance(value, float):
        return None if is_strict and not math.isfinite(value) else value
    if value is None or isinstance(value, (str, int)):
        return value
    return _plain(value.tolist(), is_strict=is_strict) if hasattr(value, "tolist") else str(value)
