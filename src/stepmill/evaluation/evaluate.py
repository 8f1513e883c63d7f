"""`evaluate`: a queue of episodes over the envs of a pool. No env waits for another one's episode."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from stepmill import OnFault, Pool, UsageError
from stepmill.evaluation.episode_env import EpisodeEnv
from stepmill.evaluation.journal import Journal
from stepmill.evaluation.plan import EnvFn, Plan, Tasks, make_plan
from stepmill.evaluation.player import Player
from stepmill.evaluation.policies import Actor
from stepmill.evaluation.result import Episode, Evaluation
from stepmill.evaluation.settings import EvaluateOptions
from stepmill.observe.progress import BarColumn, TextColumn, TimeRemainingColumn, show_progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepmill.evaluation.settings import EvaluateKeywords

_OWN_OPTIONS = {"autoreset_mode", "num_episodes"}


def evaluate(
    policy: Any,
    env: str | EnvFn | None = None,
    *,
    tasks: Tasks = None,
    seeds: Iterable[int] = range(100),
    num_envs: int = 16,
    **options: Unpack[EvaluateKeywords],
) -> Evaluation:
    """Play each seed in each task exactly once, and return what came of it.

    Whichever env is free plays the next episode, and the policy acts for those that are ready. If the policy computes each row by
    itself, an episode is the same, to the bit, with any number of envs and workers and on every backend.

    Args:
        policy: one of

            - `policy(obs) -> actions`: observations [B, ...], actions [B, ...]; B changes from call to call.
            - `policy(obs, episode_ids, is_first) -> actions`, for policies with memory: the number of each row's episode, by
              task and then by seed, [B] int64; whether the row is the observation of a reset, [B] bool.
            - a `torch.nn.Module`, called with tensors on its device. Its output is the actions; for discrete actions also
              logits [B, n], of which the largest is taken.
            - a model of Stable-Baselines3 or sb3-contrib, recurrent or not, whose `predict` is called with deterministic=True.
        env: a Gymnasium id, or a function that makes an env.
        tasks: a mapping by name, or a sequence: each is a mapping of reset options for `env`, or an env function of its own
            with the same spaces.
        seeds: what `reset` gets, one after the other in each task.
        num_envs: how many episodes are under way at once.
        **options: fields of EvaluateOptions, and of PoolOptions, such as `num_workers`, `step_timeout_s` and
            `on_fault="replay"`.

    Raises:
        UsageError: an argument is invalid, or the policy's actions are.
        EnvError, WorkerDied: the envs could not be built.
    """
    began_s = perf_counter()
    own = {field.name for field in fields(EvaluateOptions)} & options.keys()
    settings = EvaluateOptions(**{name: options.pop(name) for name in own})  # type: ignore[misc]  # a name that varies
    plan = make_plan(env, tasks, seeds, must_render=settings.videos is not None)
    with Journal(settings.resume, plan, settings.success) as journal:
        todo = [episode_id for episode_id in range(len(plan)) if plan.key_of(episode_id) not in journal.known]
        columns = (BarColumn(), TextColumn("{task.completed}/{task.total} episodes"), TimeRemainingColumn())
        with show_progress(*columns, is_quiet=not settings.progress) as bar:
            shown = bar.add_task("", total=len(plan), completed=len(plan) - len(todo))
            for episode in _play(policy, plan, todo, min(num_envs, len(todo)), settings, options):
                journal.add(episode)
                bar.advance(shown)
        played = tuple(journal.known[plan.key_of(episode_id)] for episode_id in range(len(plan)))
    return Evaluation(plan.env, played, perf_counter() - began_s)


def _play(
    policy: Any, plan: Plan, todo: Sequence[int], num_envs: int, settings: EvaluateOptions, options: Mapping[str, Any]
) -> Iterator[Episode]:
    if not todo:
        return
    make_env: EnvFn = partial(EpisodeEnv, plan.makers, settings.success) if plan.has_orders else plan.makers[0]
    for name in _OWN_OPTIONS & options.keys():
        raise UsageError(f"evaluate() decides when an env is reset; leave {name} out")
    if OnFault(options.get("on_fault", OnFault.RAISE)) is OnFault.TRUNCATE:
        raise UsageError("on_fault='truncate' would end episodes early; leave it out, or use 'replay'")
    with Pool([make_env] * num_envs, **{"episode_stats": False, **options, "autoreset_mode": "Disabled"}) as pool:
        if pool.num_rows != pool.num_envs or pool.spec.agents or pool.spec.reward.shape:
            raise UsageError("evaluate() needs envs of one agent, with one row and one reward each; wrap the env")
        actor = Actor(policy, pool.single_observation_space, pool.single_action_space, num_envs, settings.num_rows)
        yield from Player(pool, actor, plan, todo, settings).episodes()
