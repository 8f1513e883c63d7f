"""The plan of an evaluation: tasks, seeds, and options. Each seed is played in each task once."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from stepmill import MissingExtraError, UsageError

EnvFn: TypeAlias = "Callable[[], object]"
Task: TypeAlias = "Mapping[str, Any] | EnvFn"
Tasks: TypeAlias = "Mapping[str, Task] | Sequence[Task] | None"
Success: TypeAlias = "str | Callable[[dict[str, Any]], object] | None"
_FIXED_ROWS = 32

if TYPE_CHECKING:
    from stepmill.spec.options import OptionKeywords

    class EvaluateKeywords(OptionKeywords, total=False):
        """The fields of `EvaluateOptions` and of `PoolOptions` as keyword arguments."""

        success: Success
        infos: Sequence[str]
        retries: int
        batch_size: int | Literal["fixed"] | None
        resume: str | os.PathLike[str] | None
        videos: str | os.PathLike[str] | None
        record: Literal["all", "failures"] | int
        progress: bool


@dataclass(frozen=True, kw_only=True)
class EvaluateOptions:
    """Options of what `evaluate` counts and what it writes. Each field is a keyword of `evaluate`.

    Attributes:
        success: the name of the info, or a function of the last step's info, that says whether an episode was successful.
            None means "is_success" or "success", if the env has it.
        infos: the names of infos of the last step that `Episode.infos` keeps.
        retries: how often an episode that ended in a fault of its env is repeated. After that it is listed with the fault.
        batch_size: how many rows the policy gets. None means as many as there are envs that are ready. With a number, or "fixed" for
            32, each call has that many rows; missing rows are filled (with episode_id -1), because networks round differently
            for other numbers of rows.
        resume: a file to which each finished episode is appended at once. If it exists, episodes that are in it are not
            played again. The env, tasks, `success` and the policy are identified by their reprs and all arrays, tensors and
            modules that they refer to. One evaluation at a time can use a file.
        videos: a folder for a video of each episode, `TASK-SEED.mp4`; it is made if it is missing. Workers render the frames.
        record: which videos are made: "all", "failures" (episodes that are not successful), or a number k for the first k episodes.
        progress: whether to show a bar on stderr, if it is a terminal.
    """

    success: Success = None
    infos: Sequence[str] = ()
    retries: int = 2
    batch_size: int | Literal["fixed"] | None = None
    resume: str | os.PathLike[str] | None = None
    videos: str | os.PathLike[str] | None = None
    record: Literal["all", "failures"] | int = "all"
    progress: bool = True

    def __post_init__(self) -> None:
        record, batch_size = self.record, self.batch_size
        for is_right, text in (
            (record in ("all", "failures") or _is_count(record), f"{record=} is not 'all', 'failures', or a number"),
            (record == "all" or self.videos, "record= says which videos are made; give videos=, their folder"),
            (batch_size in (None, "fixed") or _is_count(batch_size, 1), f"{batch_size=} must be 1 or more"),
            (_is_count(self.retries), f"retries={self.retries!r} is not a number, 0 or more"),
            (not isinstance(self.infos, str), f"infos={self.infos!r} is one text; give a list of names"),
        ):
            if not is_right:
                raise UsageError(text)
        if self.videos is not None and find_spec("imageio_ffmpeg") is None:
            raise MissingExtraError(module="imageio_ffmpeg", extra="video")

    @property
    def num_rows(self) -> int | None:
        """How many rows each call of the policy has; None means as many as there are."""
        return _FIXED_ROWS if self.batch_size == "fixed" else self.batch_size

    def video_of(self, episode_id: int, name: str) -> str | None:
        """Return the path of an episode's video, or None."""
        if self.videos is None or (isinstance(self.record, int) and episode_id >= self.record):
            return None
        return str(Path(self.videos).absolute() / f"{name}.mp4")


def _is_count(value: object, least: int = 0) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


@dataclass(frozen=True)
class Pair:
    """A task and a seed. It is played once, and its place in the plan is the episode's id.

    Attributes:
        task: the name of the task; None without tasks.
        seed, options: the arguments of each `reset` of the env.
        maker: which of the plan's env functions makes the env.
        file_name: the name of the episode's files, without the ending.
    """

    task: str | None
    seed: int
    options: dict[str, Any]
    maker: int
    file_name: str


@dataclass(frozen=True)
class Plan:
    """All episodes of an evaluation.

    Attributes:
        env: the name of the env, for texts.
        makers: the env functions.
        pairs: the episodes, by task and then by seed.
        has_orders: whether the envs are `EpisodeEnv`s, whose resets say which episode begins.
        given: the env and the tasks by name, as they were given.
    """

    env: str
    makers: tuple[EnvFn, ...]
    pairs: tuple[Pair, ...]
    has_orders: bool
    given: tuple[object, Mapping[str, object]]


def make_plan(env: str | EnvFn | None, tasks: Tasks, seeds: Iterable[int], *, must_render: bool) -> Plan:
    """Check the arguments of `evaluate`, and return all its episodes.

    Raises:
        UsageError: an argument is invalid.
    """
    if tasks is None and env is None:
        raise UsageError("there is nothing to evaluate; give `env`, or env functions as `tasks`")
    makers = [] if env is None else [_maker(env, must_render=must_render)]
    named: dict[str | None, Task] = {None: {}} if tasks is None else _named(tasks)
    checked_seeds = _checked(seeds)
    file_names = _unique([_file_name(f"{name}") for name in named], "_")
    pairs: list[Pair] = []
    for (name, task), file_name in zip(named.items(), file_names, strict=True):
        prefix = "" if name is None else f"{file_name}-"
        if callable(task):
            makers.append(task)
        elif not isinstance(task, Mapping):
            raise UsageError(f"task {name!r} is {task!r}; give a mapping of reset options, or an env function")
        elif env is None:
            raise UsageError(f"task {name!r} has no env; give `env`, or an env function in place of {task!r}")
        options, maker = ({}, len(makers) - 1) if callable(task) else ({**task}, 0)
        pairs += [Pair(name, seed, options, maker, f"{prefix}{seed}") for seed in checked_seeds]
    if not pairs:
        raise UsageError("`tasks` is empty; leave it out, or give at least one task")
    title = env if isinstance(env, str) else _name(makers[0])
    given = env, {f"{name}": task for name, task in named.items()}
    return Plan(title, tuple(makers), tuple(pairs), must_render or len(makers) > 1, given)


def _file_name(name: str) -> str:
    """Return a name without separators and of at most 100 bytes, because file systems allow 255 for the whole name."""
    return re.sub(r"[^\w.=-]+", "_", name).encode()[:100].decode(errors="ignore")


def _checked(seeds: Iterable[int]) -> tuple[int, ...]:
    try:
        found = tuple(map(index, seeds))
    except TypeError as exc:
        raise UsageError(f"seeds={seeds!r} must be whole numbers, such as range(100): {exc}") from exc
    if not found or min(found) < 0:
        raise UsageError(f"seeds={found[:8]!r} must be 0 or more, and there must be at least one")
    if twice := sorted(seed for seed, count in Counter(found).items() if count > 1):
        raise UsageError(f"seeds {twice[:8]} are given twice; each pair of a task and a seed is played once")
    return found


def _maker(env: str | EnvFn, *, must_render: bool) -> EnvFn:
    if callable(env):
        return env
    if not isinstance(env, str):
        raise UsageError(f"env is a {type(env).__name__}; give a Gymnasium id, or a function that makes an env")
    import gymnasium

    kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if must_render else {}
    return partial(gymnasium.make, env, disable_env_checker=True, **kwargs)


def _named(tasks: Mapping[str, Task] | Sequence[Task]) -> dict[str | None, Task]:
    """Name the tasks of a sequence: options by their text, env functions by their name."""
    values = list(tasks.values() if isinstance(tasks, Mapping) else tasks)
    names = [*map(str, tasks)] if isinstance(tasks, Mapping) else [*map(_name, values)]
    return dict(zip(_unique(names, " #"), values, strict=True))


def _unique(names: Sequence[str], sign: str) -> list[str]:
    """Return the names. Equal names get their position as a suffix, as often as is needed until all differ."""
    counts = Counter(names)
    names = [name if counts[name] == 1 else f"{name}{sign}{place}" for place, name in enumerate(names)]
    return names if len(set(names)) == len(names) else _unique(names, sign)


def _name(task: Task) -> str:
    if isinstance(task, Mapping):
        return ", ".join(f"{key}={value}" for key, value in task.items())
    while isinstance(task, partial):
        first = task.args[0] if task.args else None
        env_id = getattr(first, "id", first)  # of Gymnasium's spec, or of gymnasium.make
        if isinstance(env_id, str):
            return env_id
        task = task.func
    return getattr(task, "__name__", type(task).__name__)
