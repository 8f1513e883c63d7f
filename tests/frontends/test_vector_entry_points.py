"""`install_vector_entry_points`: `gymnasium.make_vec` makes stepmill's vector envs, for libraries that call it themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleEnv, CartPoleVectorEnv
from gymnasium.envs.registration import registry

import stepmill

BARE, TAKEN = "stepmill-tests/Bare-v0", "stepmill-tests/Taken-v0"


@pytest.fixture(autouse=True)
def ids() -> Iterator[None]:
    gymnasium.register(BARE, entry_point=CartPoleEnv, max_episode_steps=7, kwargs={"sutton_barto_reward": True})
    gymnasium.register(TAKEN, entry_point=CartPoleEnv, vector_entry_point=CartPoleVectorEnv)
    yield
    for name in (BARE, TAKEN):
        del registry[name]


def make(name: str, num_envs: int = 3, **keywords: Any) -> Any:
    return gymnasium.make_vec(name, num_envs, vectorization_mode="vector_entry_point", **keywords)


def test_gymnasium_makes_a_vector_env_with_the_options_of_the_installation() -> None:
    with stepmill.install_vector_entry_points([BARE], backend="process", num_workers=2), make(BARE) as envs:
        assert type(envs) is stepmill.VectorEnv
        assert len(envs.stats().workers) == 2
        assert envs.spec.kwargs["vectorization_mode"] == "vector_entry_point"


def test_its_data_are_those_of_gymnasiums_own_vector_env() -> None:
    with stepmill.install_vector_entry_points([BARE], backend="process"), make(BARE) as envs:
        theirs = gymnasium.make_vec(BARE, 3, vectorization_mode="sync")
        assert np.array_equal(envs.reset(seed=3)[0], theirs.reset(seed=3)[0])
        for _ in range(20):  # more than the 7 steps of an episode, and with the registration's reward
            actions = theirs.action_space.sample()
            for ours, own in zip(envs.step(actions)[:4], theirs.step(actions)[:4], strict=True):
                assert np.array_equal(ours, own)


def test_keywords_of_make_vec_override_those_of_the_installation_and_the_registration() -> None:
    with (
        stepmill.install_vector_entry_points([BARE], backend="process", num_workers=1),
        make(BARE, num_workers=3, sutton_barto_reward=False, max_episode_steps=5) as envs,
    ):
        assert len(envs.stats().workers) == 3
        assert envs.get_attr("_sutton_barto_reward") == (False,) * 3
        envs.reset(seed=0)
        assert [envs.step([0, 1, 0])[3].any() for _ in range(5)] == [False] * 4 + [True]


def test_an_entry_point_that_an_env_has_already_is_replaced_only_if_that_is_wanted() -> None:
    with pytest.raises(stepmill.UsageError, match=f"{TAKEN} .*replace_others=True"):
        stepmill.install_vector_entry_points([BARE, TAKEN])
    assert registry[BARE].vector_entry_point is None  # nothing was installed

    with stepmill.install_vector_entry_points([BARE, TAKEN, TAKEN], replace_others=True), make(TAKEN) as envs:
        assert type(envs) is stepmill.VectorEnv
    assert registry[TAKEN].vector_entry_point is CartPoleVectorEnv


def test_uninstall_leaves_an_entry_point_that_another_has_set_since() -> None:
    installed = stepmill.install_vector_entry_points([BARE])
    registry[BARE].vector_entry_point = CartPoleVectorEnv
    installed.uninstall()
    assert registry[BARE].vector_entry_point is CartPoleVectorEnv


def test_an_unknown_keyword_is_an_error_of_the_installation() -> None:
    with pytest.raises(stepmill.UsageError, match="on_falt"):
        stepmill.install_vector_entry_points([BARE], on_falt="truncate")  # type: ignore[call-arg]
    assert registry[BARE].vector_entry_point is None


def test_an_unknown_id_is_gymnasiums_error() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match="CartPol"):
        stepmill.install_vector_entry_points(["CartPol-v1"])
