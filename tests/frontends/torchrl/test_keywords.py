"""Keyword arguments of `StepmillEnv`: options, EnvBase's own, and unknown ones."""

from __future__ import annotations

import gymnasium
import pytest

import stepmill
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.spec.errors import UsageError


def make():
    return gymnasium.make("CartPole-v1")


def test_options_are_keywords():
    env = StepmillEnv([make] * 2, backend="serial", slots=2, run_type_checks=True)
    assert (env.pool.options.backend, env.pool.options.slots, env.run_type_checks) == ("serial", 2, True)
    env.close()


def test_mistakes_are_answered_in_words():
    with pytest.raises(UsageError, match="num_worker is not an option of stepmill; did you mean num_workers"):
        StepmillEnv([make] * 2, num_worker=2)
    with pytest.raises(UsageError, match=r"env_fns is a function; give a list .*\[make_env\] \* 8"):
        StepmillEnv(make)
    with pytest.raises(UsageError, match="options is a dict"):
        StepmillEnv([make], options={"copy": True})


def test_a_pool_cannot_have_options_any_more():
    with (
        stepmill.Pool([make], backend="serial", autoreset_mode="Disabled") as pool,
        pytest.raises(UsageError, match="slots came too late: this pool is made"),
    ):
        StepmillEnv(pool, slots=2)
