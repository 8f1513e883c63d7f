"""Rollouts have the same data as a loop over `step`, in both autoreset modes, with all envs at once and in two halves."""

from __future__ import annotations

from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

from stepmill import EnvError, Pool, PoolOptions, Rollout, UsageError
from stepmill.frontends.ray_rollout import Fragment, joined
from stepmill.testing.envs import BatchedCountingEnv
from tests.harness.envs_of_other_apis import Tag

T, N = 17, 5


class Ends(gymnasium.Env):
    """Counts; even episodes are terminated after 4 steps, odd ones truncated after 3. Action 9 raises."""

    action_space = gymnasium.spaces.Dict({"turn": gymnasium.spaces.Discrete(10)})
    observation_space = gymnasium.spaces.Dict(
        {"at": gymnasium.spaces.Box(0, 1000, (2,), np.int64), "x": gymnasium.spaces.Box(0, 1, (), np.float32)}
    )

    def __init__(self):
        self.episode = -1

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        if action["turn"] == 9:
            raise ValueError("nine")
        self.t += 1
        is_cut = bool(self.episode % 2)
        return self._obs(), self.t + float(action["turn"]), not is_cut and self.t == 4, is_cut and self.t == 3, {}

    def _obs(self):
        return {"at": np.array([self.episode, self.t]), "x": np.float32(self.np_random.random())}


def act(obs, env_ids):
    assert obs["at"].shape == (len(env_ids), 2)
    turn = (obs["at"][:, 1] + env_ids) % 3
    return {"turn": turn}, {"doubled": turn * 2.0}


def transitions(batch):
    """Every real step as (env, obs, action, reward, next obs, terminated, truncated), in the order of an env's steps."""
    finals = {tuple(at): place for place, at in enumerate(batch.final_at.tolist())}
    rows = {n: [] for n in range(batch.reward.shape[1])}
    for t, n in zip(*np.nonzero(batch.valid), strict=True):
        place = finals.get((t, n))
        following = batch.obs["at"][t + 1, n] if place is None else batch.final_obs["at"][place]
        step = (batch.obs["at"][t, n], batch.action["turn"][t, n], batch.reward[t, n], following)
        rows[n].append([np.asarray(each).tolist() for each in (*step, batch.terminated[t, n], batch.truncated[t, n])])
    return rows


def collected(where, mode, *, is_double_buffered=False, times=3):
    workers = {"serial": 0}.get(where, 2)
    start = {"context": "fork"} if where == "process" else {}
    options = PoolOptions(autoreset_mode=mode, **start)
    with Pool([Ends] * N, backend=where, num_workers=workers, options=options) as pool:
        rollout = Rollout(pool, T, is_double_buffered=is_double_buffered)
        rollout.reset(seed=3)
        rows = {n: [] for n in range(N)}
        for _ in range(times):
            for n, steps in transitions(rollout.collect(act)).items():
                rows[n] += steps
        return rows


def stepped_by_hand(num_steps):
    rows = {}
    for n in range(N):
        env, steps = Ends(), []
        obs, _ = env.reset(seed=3 + n)
        for _ in range(num_steps):
            turn = (obs["at"][1] + n) % 3
            following, reward, terminated, truncated, _ = env.step({"turn": turn})
            steps.append([obs["at"].tolist(), turn.tolist(), reward, following["at"].tolist(), terminated, truncated])
            obs = env.reset()[0] if terminated or truncated else following
        rows[n] = steps
    return rows


@pytest.mark.parametrize("is_double_buffered", [False, True])
@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
@pytest.mark.parametrize("where", ["serial", "thread", "process"])
def test_a_rollout_holds_the_steps_that_stepping_by_hand_gives(where, mode, is_double_buffered):
    ours, theirs = collected(where, mode, is_double_buffered=is_double_buffered), stepped_by_hand(3 * T)
    for n in range(N):
        assert len(ours[n]) == 3 * T if mode == "SameStep" else len(ours[n]) < 3 * T
        assert ours[n] == theirs[n][: len(ours[n])]


def test_what_the_policy_adds_is_kept():
    with Pool([Ends] * 3, backend="serial", num_workers=0) as pool:
        batch = Rollout(pool, 6).collect(act)
        assert (batch.extras["doubled"] == batch.action["turn"] * 2).all()
        assert batch.extras["doubled"].shape == (6, 3)


def test_ends_of_episodes_are_listed_with_return_and_length():
    with Pool([Ends] * 2, backend="serial", num_workers=0) as pool:
        (first, second) = Rollout(pool, 4).collect(lambda obs, ids: {"turn": ids * 0}).episodes
        assert first == {"t": 3, "env_id": 0, "r": 10.0, "l": 4}
        assert second["env_id"] == 1


@pytest.mark.parametrize("mode", ["NextStep", "SameStep"])
def test_advantages_bootstrap_where_an_episode_was_cut_and_not_where_it_ended(mode):
    with Pool([Ends] * 2, backend="serial", num_workers=0, options=PoolOptions(autoreset_mode=mode)) as pool:
        batch = Rollout(pool, 9).collect(lambda obs, ids: {"turn": ids * 0})
    value = {"at": lambda at: at[..., 0] * 10.0 + at[..., 1]}["at"]
    values, final_values = value(batch.obs["at"]), value(batch.final_obs["at"])
    advantages = batch.advantages(values, final_values, gamma=0.9, lam=0.8)
    found = [advantages[t, n] for n in range(2) for t in np.flatnonzero(batch.valid[:, n])]
    # By hand, from one env's steps: episode by episode, with the next value of a cut one.
    expected = []
    for steps in transitions(batch).values():
        later, backwards = 0.0, []
        for index, (at, _, reward, following, terminated, truncated) in enumerate(reversed(steps)):
            is_last = index == 0
            delta = reward + (0.0 if terminated else 0.9 * value(np.array(following))) - value(np.array(at))
            later = delta + (0.0 if terminated or truncated or is_last else 0.9 * 0.8 * later)
            backwards.append(later)
        expected += reversed(backwards)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert (advantages[~batch.valid] == 0).all()
    if mode == "SameStep":
        with pytest.raises(UsageError, match="final_values"):
            batch.advantages(values)


def test_after_an_error_a_reset_makes_it_usable_again():
    with Pool([Ends] * 4, backend="process", num_workers=2, options=PoolOptions(context="fork")) as pool:
        rollout = Rollout(pool, 3, is_double_buffered=True)
        with pytest.raises(EnvError, match="nine"):
            rollout.collect(lambda obs, ids: {"turn": np.where(ids == 3, 9, 0)})
        rollout.reset(seed=0)
        assert rollout.collect(act).valid.all()


@pytest.mark.parametrize("actions", [None, [1], 1, [0.5] * N, [[1]] * N], ids=repr)
def test_actions_that_do_not_fit_the_envs_are_refused(actions):
    with Pool([Ends] * N, backend="serial") as pool:
        rollout = Rollout(pool, T)
        with pytest.raises(UsageError, match="action"):
            rollout.collect(lambda obs, env_ids: {"turn": actions})
        assert rollout.collect(act).valid.any()


def test_batched_envs_fill_as_many_rows_as_they_have():
    with Pool([BatchedCountingEnv] * 2, backend="serial", num_workers=0) as pool:
        rollout = Rollout(pool, 4, is_double_buffered=True)
        batch = rollout.collect(lambda obs, ids: np.zeros(len(ids), np.int64))
        assert batch.reward.shape == (4, pool.num_rows)


def test_misuse_is_refused():
    disabled = PoolOptions(autoreset_mode="Disabled")
    with Pool([Ends], backend="serial", options=disabled) as pool, pytest.raises(UsageError, match="reset themselves"):
        Rollout(pool, 3)
    with Pool([Ends], backend="serial") as pool:
        with pytest.raises(UsageError, match="num_steps"):
            Rollout(pool, 0)
        with pytest.raises(UsageError, match="needs 2 envs or more"):
            Rollout(pool, 3, is_double_buffered=True)


def test_pools_whose_rows_a_rollout_cannot_hold_are_refused_before_a_step():
    with Pool([Ends] * 2, backend="serial", num_episodes=2) as pool, pytest.raises(UsageError, match="num_episodes=2"):
        Rollout(pool, 4)
    with Pool([Tag], backend="serial") as pool, pytest.raises(UsageError, match="AgentVectorEnv"):
        Rollout(pool, 4)


class Pair(gymnasium.Env):
    """Its action is a tuple of a number and a dict; the reward is their sum."""

    action_space = gymnasium.spaces.Tuple(
        (gymnasium.spaces.Discrete(9), gymnasium.spaces.Dict({"more": gymnasium.spaces.Discrete(9)}))
    )
    observation_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        return 0, float(action[0] + action[1]["more"]), False, False, {}


@pytest.mark.parametrize("has_extras", [False, True])
def test_an_action_that_is_a_pair_with_a_dict_is_not_taken_for_extras(has_extras):
    def policy(obs, ids):
        action = (np.full(len(ids), 2), {"more": np.full(len(ids), 3)})
        return (action, {"value": np.ones(len(ids))}) if has_extras else action

    with Pool([Pair] * 2, backend="serial") as pool:
        batch = Rollout(pool, 3).collect(policy)
        assert batch.reward.tolist() == [[5, 5]] * 3
        assert [*batch.extras] == ["value"] * has_extras


def test_extras_are_those_of_the_policy_that_acts():
    with Pool([Ends] * N, backend="serial") as pool:
        rollout = Rollout(pool, 2)
        first = rollout.collect(
            lambda obs, ids: ({"turn": np.zeros(N, int)}, {"value": np.zeros(N, int), "old": obs["x"]})
        )
        assert sorted(first.extras) == ["old", "value"]
        second = rollout.collect(lambda obs, ids: ({"turn": np.zeros(N, int)}, {"value": np.full(N, 0.75)}))
        assert {name: column.tolist() for name, column in second.extras.items()} == {"value": [[0.75] * N] * 2}


def test_fragments_of_batched_envs_are_joined_by_their_columns():
    make, fragments = partial(BatchedCountingEnv, autoreset_mode=AutoresetMode.SAME_STEP), []
    for node in range(2):
        with Pool([make] * 2, backend="serial", autoreset_mode="SameStep") as pool:
            batch = Rollout(pool, T).collect(lambda obs, ids: np.zeros(len(ids), int))
            fragments.append(Fragment(node, np.arange(2) + 2 * node, 0, True, batch))
    whole = joined(fragments)
    over = whole.terminated | whole.truncated
    assert over.any()
    assert sorted(map(tuple, whole.final_at.tolist())) == sorted(map(tuple, np.argwhere(over).tolist()))
