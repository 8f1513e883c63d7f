"""`evaluate`: a queue of episodes over the envs of a pool. No env waits for another one's episode."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from stepmill import OnFault, Pool, UsageError
from stepmill.evaluation.episode_env import EpisodeEnv, Films, Success, find_success
from stepmill.evaluation.journal import Journal
from stepmill.evaluation.plan import EnvFn, Tasks, make_plan
from stepmill.evaluation.player import Player
from stepmill.evaluation.policies import FIXED_ROWS, Actor
from stepmill.evaluation.result import Evaluation
from stepmill.observe.progress import BarColumn, TextColumn, TimeRemainingColumn, show_progress

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from stepmill.spec.options import OptionKeywords

_OWN_OPTIONS = ("autoreset_mode", "num_episodes")


def evaluate(
    policy: Any,
    env: str | EnvFn | None = None,
    *,
    tasks: Tasks = None,
    seeds: Iterable[int] = range(100),
    num_envs: int = 16,
    success: Success = None,
    infos: Sequence[str] = (),
    retries: int = 2,
    batch_size: int | Literal["fixed"] | None = None,
    resume: str | os.PathLike[str] | None = None,
    videos: str | os.PathLike[str] | None = None,
    record: Literal["all", "failures"] | int = "all",
    progress: bool = True,
    **options: Unpack[OptionKeywords],
) -> Evaluation:
    """Play each seed in each task exactly once, and return what came of it.

    Whichever env is free plays the next episode, and the policy acts for those that are ready. What an episode returns depends on
    its task, its seed and the policy alone, if the policy computes each row by itself: then it is the same, to the bit, with any
    number of envs and workers and on every backend.

    Args:
        policy: one of

            - `policy(obs) -> actions`: observations [B, ...], actions [B, ...]; B changes from call to call.
            - `policy(obs, episode_ids, is_first) -> actions`, for policies with memory: episode_ids [B] int64 counts the
              episodes by task and then by seed, is_first [B] bool marks the observation of a reset.
            - a `torch.nn.Module`, called with tensors on its device. Its output is the actions; for discrete actions also
              logits [B, n], of which the largest is taken.
            - a model of Stable-Baselines3 or sb3-contrib, recurrent or not, whose `predict` is called with deterministic=True.
        env: a Gymnasium id, or a function that makes an env.
        tasks: a mapping by name, or a sequence: each is a mapping of reset options for `env`, or an env function of its own
            with the same spaces.
        seeds: what `reset` gets, one after the other in each task.
        num_envs: how many episodes are under way at once.
        success: the name of the info, or a function of the last step's info, that says whether an episode was successful.
            None is "is_success" or "success", if the env has it.
        infos: names of infos of the last step that `Episode.infos` keeps.
        retries: how often an episode that ended in a fault of its env is begun again. Then it is listed with the fault.
        batch_size: how many rows the policy gets. None is as many envs as are ready. A number, or "fixed" for 32, fills the
            rows up (with episode_id -1), because networks round differently for other numbers of rows.
        resume: a file to which each finished episode is appended at once. If it exists, episodes that are in it are not
            played again. It does not know the policy: use one file for each.
        videos: a folder for a video of each episode, `TASK-SEED.mp4`; it is made if missing. Frames are rendered in the workers.
        record: which videos: "all", "failures" (episodes that are not successful), or only the first k episodes of the plan.
        progress: show a bar on stderr, if it is a terminal.
        **options: fields of PoolOptions, such as `num_workers`, `step_timeout_s` and `on_fault="replay"`.

    Raises:
        UsageError: an argument is invalid, or the policy's actions are.
        EnvError, WorkerDied: the envs could not be built.
    """
    for name in _OWN_OPTIONS:
        if name in options:
            raise UsageError(f"evaluate() decides when an env is reset; leave {name} out")
    if OnFault(options.get("on_fault", OnFault.RAISE)) is OnFault.TRUNCATE:
        raise UsageError("on_fault='truncate' would end episodes early; leave it out, or use 'replay'")
    began_s = perf_counter()
    plan = make_plan(env, tasks, seeds, must_render=videos is not None)
    films = Films(videos, record, plan)
    has_orders = len(plan.makers) > 1 or videos is not None
    make_env: EnvFn = partial(EpisodeEnv, plan.makers, success) if has_orders else plan.makers[0]
    with Journal(resume, plan, success) as journal:
        known = journal.known
        todo = [episode_id for episode_id in range(len(plan)) if plan.key_of(episode_id) not in known]
        columns = (BarColumn(), TextColumn("{task.completed}/{task.total} episodes"), TimeRemainingColumn())
        with show_progress(*columns, is_quiet=not progress) as bar:
            shown = bar.add_task("", total=len(plan), completed=len(plan) - len(todo))
            if todo:
                keywords: Any = {"episode_stats": False, **options, "autoreset_mode": "Disabled"}
                with Pool([make_env] * min(num_envs, len(todo)), **keywords) as pool:
                    actor = _make_actor(policy, pool, batch_size)
                    judge = partial(find_success, success=success)
                    player = Player(pool, actor, plan, todo, films, judge=judge, infos=infos, retries=retries)
                    for episode in player.episodes():
                        journal.add(episode)
                        known[episode.task, episode.seed] = episode
                        bar.advance(shown)
    played = tuple(known[plan.key_of(episode_id)] for episode_id in range(len(plan)))
    return Evaluation(plan.env, played, perf_counter() - began_s)


def _make_actor(policy: Any, pool: Pool, batch_size: int | Literal["fixed"] | None) -> Actor:
    if pool.num_rows != pool.num_envs or pool.spec.agents or pool.spec.reward.shape:
        raise UsageError("evaluate() needs envs of one agent, with one row and one reward each; wrap the env")
    num_rows = FIXED_ROWS if batch_size == "fixed" else batch_size
    if num_rows is not None and num_rows < 1:
        raise UsageError(f"batch_size={num_rows} must be 1 or more")
    return Actor(policy, pool.single_observation_space, pool.single_action_space, pool.num_envs, num_rows)
