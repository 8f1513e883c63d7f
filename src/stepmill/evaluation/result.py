"""What an evaluation has found: a row per episode, and means with confidence intervals."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]

Interval = tuple[float, float]
_Z = 1.959963984540054  # of the normal distribution, for 95 %
_NUM_RESAMPLES = 2000
_CHUNK = 1 << 22  # drawn indices that are in memory at once


@dataclass(frozen=True)
class Episode:
    """One episode. If it could not be played, `fault` says why, and return, length and success are None.

    Attributes:
        task: the name of the task; None without tasks.
        seed: what the env's `reset` got.
        episode_return: the sum of the rewards.
        length: the number of steps.
        success: whether the env was successful; None if the env does not say.
        wall_s: seconds from the command for its reset to its last step.
        fault: the error of the last attempt.
        attempts: how often it was begun, 1 without faults.
        infos: those that were asked for, from the last step.
    """

    task: str | None
    seed: int
    episode_return: float | None
    length: int | None
    success: bool | None
    wall_s: float
    fault: str | None = None
    attempts: int = 1
    infos: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Summary:
    """Means of some episodes, with intervals that have 95 % confidence. Episodes with a fault only count as `num_failed`.

    Attributes:
        num_episodes: those that were played to their end.
        num_failed: those that could not be played.
        mean_return, mean_length: None without episodes.
        return_interval: of the mean return, by the percentile bootstrap with 2,000 resamples and a fixed seed.
        success_rate: the share of successful episodes; None if the env does not say for all of them.
        success_interval: of the success rate, as by Wilson (1927).
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
        elapsed_s: seconds of this run.
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
        names = dict.fromkeys(episode.task for episode in self.episodes)
        return {
            name: summarise([episode for episode in self.episodes if episode.task == name])
            for name in names
            if name is not None
        }

    def to_pandas(self) -> pd.DataFrame:
        """Return a row per episode, with a column for each info. It needs pandas."""
        import pandas as pd

        rows = [{**asdict(episode), **episode.infos} for episode in self.episodes]
        return pd.DataFrame(rows).drop(columns="infos")

    def to_json(self, path: str | Path | None = None) -> str:
        """Return all as a JSON document, and write it to `path` if there is one."""
        content = {
            "env": self.env,
            "elapsed_s": self.elapsed_s,
            "summary": asdict(self.summary),
            "by_task": {name: asdict(summary) for name, summary in self.by_task.items()},
            "episodes": [asdict(episode) for episode in self.episodes],
        }
        text = dump_json(content)
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
            table.add_row(name, *_cells(summary))
        text = StringIO()
        Console(file=text, width=110).print(table)
        return text.getvalue().rstrip()


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
    """Return the interval of the mean of values [n], n > 0, that holds 95 % of the means of resamples."""
    random = np.random.default_rng(0)
    num_at_once = max(1, _CHUNK // len(values))
    means = np.concatenate(
        [
            values[random.integers(len(values), size=(min(num_at_once, _NUM_RESAMPLES - start), len(values)))].mean(
                axis=1
            )
            for start in range(0, _NUM_RESAMPLES, num_at_once)
        ]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)


def wilson_interval(num_successes: int, num_trials: int) -> Interval:
    """Return Wilson's interval of a share, which stays within 0 and 1 also where all trials end alike."""
    share, z2 = num_successes / num_trials, _Z**2
    middle = share + z2 / (2 * num_trials)
    width = _Z * (share * (1 - share) / num_trials + z2 / (4 * num_trials**2)) ** 0.5
    scale = 1 + z2 / num_trials
    return max(0.0, (middle - width) / scale), min(1.0, (middle + width) / scale)


def dump_json(value: object) -> str:
    """Return JSON on one line; arrays become lists, and what JSON does not know becomes its text."""
    return json.dumps(value, default=lambda other: other.tolist() if hasattr(other, "tolist") else str(other))


def _cells(summary: Summary) -> list[str]:
    return [
        f"{summary.num_episodes}",
        f"{summary.num_failed}",
        _text(summary.mean_return, "{:.4g}"),
        _interval_text(summary.return_interval, "{:.4g}"),
        _text(summary.mean_length, "{:.1f}"),
        _text(summary.success_rate, "{:.1%}"),
        _interval_text(summary.success_interval, "{:.1%}"),
    ]


def _text(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def _interval_text(interval: Interval | None, form: str) -> str:
    return "–" if interval is None else f"{form.format(interval[0])} to {form.format(interval[1])}"
