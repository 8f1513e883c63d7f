"""Keyword arguments of `StepmillEnv`: options, EnvBase's own, and unknown ones."""

from __future__ import annotations

import gymnasium
import pytest

import stepmill
from stepmill.frontends.torchrl import StepmillEnv
from stepmill.spec.errors import UsageError


def make():
    return gymnasium.make("CartPole-v1")


def test_options_are_keywords(made):
    env = made(StepmillEnv([make] * 2, backend="serial", tuning={"slots": 2}, run_type_checks=True))
    assert (env.pool.options.backend, env.pool.options.tuning.slots, env.run_type_checks) == ("serial", 2, True)


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
        pytest.raises(UsageError, match="tuning: this pool exists already"),
    ):
        StepmillEnv(pool, tuning={"slots": 2})


@pytest.mark.covers("T-16")
def test_arguments_of_parallel_env_that_are_options_here_do_what_they_say(made):
    env = made(StepmillEnv([make] * 2, mp_start_method="fork", num_sub_threads=3, num_workers=1, backend="process"))
    assert (env.pool.options.context, env.pool.options.workers.threads) == ("fork", 3)
    assert env.create_env_kwargs == [{}, {}]
    env = made(StepmillEnv([make], serial_for_single=True, daemon=True, metadata_from_workers=True, use_buffers=None))
    assert env.pool.options.backend == "serial"
    env = made(
        StepmillEnv(
            [make] * 2, serial_for_single=True, shared_memory=True, memmap=False, pin_memory=False, backend="process"
        )
    )
    assert env.pool.options.backend != "serial"
    with pytest.raises(UsageError, match="the workers have been started; give use_buffers to StepmillEnv"):
        env.configure_parallel(use_buffers=True)


@pytest.mark.covers("T-16")
@pytest.mark.parametrize(
    ("argument", "advice"),
    [
        ({"allow_step_when_done": True}, "reset an env that is done"),
        ({"consolidate": False}, "leave it out"),
        ({"memmap": True}, "leave it out"),
        ({"non_blocking": True}, "non_blocking=True"),
        ({"num_threads": 2}, "torch.set_num_threads"),
        ({"pin_memory": True}, "pin_memory()"),
        ({"policy_proof": make}, "wrap the policy"),
        ({"share_individual_td": True}, "one block of memory"),
        ({"shared_memory": False}, "backend='thread'"),
        ({"shutdown_timeout": 10.0}, "1.5 s"),
        ({"use_buffers": False}, "leave it out"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_other_arguments_of_parallel_env_are_refused_by_name(argument, advice):
    name = next(iter(argument))
    with pytest.raises(UsageError, match=f"{name}=.* of ParallelEnv is not supported") as caught:
        StepmillEnv([make] * 2, **argument)
    assert advice in str(caught.value)
