"""Which episodes an evaluation plays: each seed in each task, once."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from stepmill import UsageError

EnvFn: TypeAlias = "Callable[[], object]"
Task: TypeAlias = "Mapping[str, Any] | EnvFn"
Tasks: TypeAlias = "Mapping[str, Task] | Sequence[Task] | None"
_UNSAFE = re.compile(r"[^\w.=-]+")  # in names of files


@dataclass(frozen=True)
class NamedTask:
    """A task: what each reset of the env gets as `options`, and which of the env functions makes the env."""

    name: str | None
    options: dict[str, Any]
    maker: int


@dataclass(frozen=True)
class Plan:
    """All episodes of an evaluation. Episode i plays seed i modulo len(seeds) in task i // len(seeds).

    Attributes:
        env: the name of the env, for texts.
        makers: the env functions.
        tasks: one without a name if there are no tasks.
        seeds: what `reset` gets.
        has_orders: whether the envs are `EpisodeEnv`s, whose resets say which episode begins.
    """

    env: str
    makers: tuple[EnvFn, ...]
    tasks: tuple[NamedTask, ...]
    seeds: tuple[int, ...]
    has_orders: bool

    def __len__(self) -> int:
        """Return the number of episodes."""
        return len(self.tasks) * len(self.seeds)

    def task_of(self, episode_id: int) -> NamedTask:
        """Return the task of an episode."""
        return self.tasks[episode_id // len(self.seeds)]

    def seed_of(self, episode_id: int) -> int:
        """Return the seed of an episode."""
        return self.seeds[episode_id % len(self.seeds)]

    def key_of(self, episode_id: int) -> tuple[str | None, int]:
        """Return the name of the task and the seed, which no other episode has."""
        return self.task_of(episode_id).name, self.seed_of(episode_id)

    def file_name_of(self, episode_id: int) -> str:
        """Return a name of files of an episode, without the ending."""
        name, seed = self.key_of(episode_id)
        return f"{seed}" if name is None else f"{_UNSAFE.sub('_', name)}-{seed}"


def make_plan(env: str | EnvFn | None, tasks: Tasks, seeds: Iterable[int], *, must_render: bool) -> Plan:
    """Check what is to be evaluated.

    Raises:
        UsageError: an argument is invalid.
    """
    makers = [] if env is None else [_maker(env, must_render=must_render)]
    named = [] if tasks is None else _named(tasks)
    found = []
    for name, task in named:
        if callable(task):
            makers.append(task)
            found.append(NamedTask(name, {}, len(makers) - 1))
        elif env is None:
            raise UsageError(
                f"task {name!r} has no env; give `env`, or an env function in place of the options {task!r}"
            )
        elif isinstance(task, Mapping):
            found.append(NamedTask(name, {**task}, 0))
        else:
            raise UsageError(f"task {name!r} is {task!r}; give a mapping of reset options, or an env function")
    if not makers:
        raise UsageError("there is nothing to evaluate; give `env`, or env functions as `tasks`")
    if tasks is not None and not found:
        raise UsageError("`tasks` is empty; leave it out, or give at least one task")
    name = env if isinstance(env, str) else _function_name(makers[0])
    plain = (NamedTask(None, {}, 0),)
    return Plan(name, tuple(makers), tuple(found) or plain, _checked(seeds), must_render or len(makers) > 1)


def _checked(seeds: Iterable[int]) -> tuple[int, ...]:
    found = tuple(map(int, seeds))
    if not found or min(found) < 0:
        raise UsageError(f"seeds={found!r} must be whole numbers, 0 or more, and at least one")
    twice = sorted({seed for seed in found if found.count(seed) > 1}) if len({*found}) < len(found) else []
    if twice:
        raise UsageError(f"seeds {twice[:8]} are given twice; each pair of a task and a seed is played once")
    return found


def _maker(env: str | EnvFn, *, must_render: bool) -> EnvFn:
    if not isinstance(env, str):
        return env
    import gymnasium

    kwargs: dict[str, Any] = {"render_mode": "rgb_array"} if must_render else {}
    return partial(gymnasium.make, env, disable_env_checker=True, **kwargs)


def _named(tasks: Mapping[str, Task] | Sequence[Task]) -> list[tuple[str, Task]]:
    """Name the tasks of a sequence: options by their text, env functions by their name, and by number if that is not unique."""
    if isinstance(tasks, Mapping):
        return [(str(name), task) for name, task in tasks.items()]
    names = [_task_name(task) for task in tasks]
    return [
        (name if names.count(name) == 1 else f"{name} #{number}", task)
        for number, (name, task) in enumerate(zip(names, tasks, strict=True))
    ]


def _task_name(task: Task) -> str:
    if isinstance(task, Mapping):
        return ", ".join(f"{key}={value}" for key, value in task.items())
    return _function_name(task)


def _function_name(maker: EnvFn) -> str:
    while isinstance(maker, partial):
        first = maker.args[0] if maker.args else None
        env_id = getattr(first, "id", first)  # of Gymnasium's spec, or of gymnasium.make
        if isinstance(env_id, str):
            return env_id
        maker = maker.func
    return getattr(maker, "__name__", type(maker).__name__)
