"""The rules that predict how fast a configuration is. Nothing is measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepmill.pool.cost_model import Configuration, EnvProfile, Machine, auto_backend, predict
from stepmill.spec.options import BackendName, PoolOptions

SERIAL = Configuration(backend=BackendName.SERIAL)
TWO_CORES = Machine(2)


def processes(num_workers, **others):
    return Configuration(backend=BackendName.PROCESS, num_workers=num_workers, **others)


def threads(num_workers, **others):
    return Configuration(backend=BackendName.THREAD, num_workers=num_workers, **others)


def profile(step_s, **others):
    return EnvProfile(steps_s=(step_s,), **others)


DURATIONS = st.floats(1e-6, 1e-2)
PROFILES = st.builds(
    EnvProfile,
    steps_s=st.lists(DURATIONS, min_size=1, max_size=4).map(lambda each: tuple(sorted(each))),
    reset_s=st.floats(0, 0.1),
    episode_steps=st.floats(1, 1000) | st.just(math.inf),
    obs_bytes=st.integers(0, 10**6),
    cpu_share=st.floats(0, 1),
    gil_share=st.floats(0, 1),
)
MACHINES = st.builds(Machine, cores=st.integers(1, 16), learner_s=st.sampled_from([0.0, 1e-4, 5e-3]))
NUM_ENVS = st.integers(1, 33)
WORKERS = st.integers(1, 33)


@settings(max_examples=60, deadline=None)
@given(PROFILES, MACHINES, NUM_ENVS, WORKERS, st.sampled_from([BackendName.THREAD, BackendName.PROCESS]), st.booleans())
def test_nothing_is_faster_than_its_workers_and_cores_allow(env, machine, num_envs, num_workers, backend, is_async):
    batch_size = max(1, num_envs // 2) if is_async else None
    configuration = Configuration(backend=backend, num_workers=num_workers, batch_size=batch_size)
    rate = predict(env, machine, configuration, num_envs)
    assert 0 < rate < math.inf
    if env.cpu_share * env.row_s > 0:
        # The samples of a distribution with rare long resets are a few percent off its mean.
        tolerance = 1.5 if env.reset_chance * env.reset_s > env.step_s / 10 or is_async else 1.1
        assert rate <= tolerance * min(machine.cores, num_workers) / (env.cpu_share * env.row_s)


@settings(max_examples=40, deadline=None)
@given(PROFILES, MACHINES, NUM_ENVS, st.floats(1, 10))
def test_slower_steps_never_make_a_pool_faster(env, machine, num_envs, factor):
    slower = EnvProfile(**{**vars(env), "steps_s": tuple(factor * each for each in env.steps_s)})
    for configuration in (SERIAL, processes(2), threads(2)):
        fast, slow = (predict(each, machine, configuration, num_envs) for each in (env, slower))
        assert slow <= fast * (1 + 1e-3)  # the longer wait may be one that no longer spins


@settings(max_examples=40, deadline=None)
@given(PROFILES, NUM_ENVS, WORKERS)
def test_on_one_core_nothing_is_faster_than_serial_if_the_envs_compute(env, num_envs, num_workers):
    computing = EnvProfile(**{**vars(env), "cpu_share": 1.0, "obs_bytes": 0})
    serial = predict(computing, Machine(1), SERIAL, num_envs)
    assert predict(computing, Machine(1), processes(num_workers), num_envs) <= serial
    assert predict(computing, Machine(1), threads(num_workers), num_envs) <= serial


@settings(max_examples=40, deadline=None)
@given(PROFILES, MACHINES, NUM_ENVS, WORKERS)
def test_resets_in_advance_and_lent_observations_never_cost_time(env, machine, num_envs, num_workers):
    plain = predict(env, machine, processes(num_workers), num_envs)
    assert predict(env, machine, processes(num_workers, overlap_resets=True), num_envs) >= plain * (1 - 1e-9)
    if num_envs * env.obs_bytes >= 16 * 1024:
        assert predict(env, machine, processes(num_workers, copy=True), num_envs) < plain


def test_envs_that_sleep_are_as_many_times_faster_as_there_are_workers():
    sleeping = profile(1e-2, cpu_share=0.01, gil_share=1.0)
    one, all_ = (predict(sleeping, TWO_CORES, each, 16) for each in (processes(1), processes(16)))
    assert all_ > 12 * one
    assert predict(sleeping, TWO_CORES, threads(16), 16) > 12 * one


def test_threads_that_hold_the_gil_are_no_faster_than_serial():
    python = profile(1e-3, gil_share=1.0)
    assert predict(python, Machine(8), threads(8), 8) <= predict(python, Machine(8), SERIAL, 8)
    native = profile(1e-3, gil_share=0.05)
    assert predict(native, Machine(8), threads(8), 8) > 5 * predict(native, Machine(8), SERIAL, 8)


def test_tiny_envs_are_fastest_in_line_and_others_in_processes():
    assert predict(profile(5e-6), TWO_CORES, SERIAL, 2) > predict(profile(5e-6), TWO_CORES, processes(2), 2)
    assert predict(profile(5e-4), TWO_CORES, SERIAL, 8) < predict(profile(5e-4), TWO_CORES, processes(2), 8)


def test_batches_of_some_envs_are_faster_if_durations_vary():
    uneven = EnvProfile(steps_s=(1e-4, 1e-4, 1e-4, 2e-3), cpu_share=1.0)
    assert predict(uneven, Machine(8), processes(8, batch_size=8), 32) > 1.1 * predict(
        uneven, Machine(8), processes(8), 32
    )


def test_spares_hide_slow_resets_if_each_env_has_its_own_worker():
    env = profile(2e-5, reset_s=1e-2, episode_steps=50, cpu_share=0.1)
    plain, few, own = (
        predict(env, TWO_CORES, each, 8)
        for each in (processes(8), processes(2, spare_envs=2), processes(10, spare_envs=2))
    )
    assert own > 2 * plain
    assert few < own


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({"num_envs": 1}, "serial"),
        ({"num_envs": 8, "num_workers": 0}, "serial"),
        ({"num_envs": 2}, "process"),
        ({"num_envs": 512}, "process"),
        ({"num_envs": 16, "step_s": 8e-6}, "serial"),
        ({"num_envs": 18, "step_s": 8e-6}, "process"),
        ({"num_envs": 2, "step_s": 1e-3}, "process"),
        ({"num_envs": 64, "step_s": 1e-7}, "serial"),
    ],
)
def test_auto_is_serial_if_it_is_known_to_be_faster(arguments, backend):
    assert auto_backend(**arguments) == backend


def test_the_keywords_of_a_configuration_are_options_without_defaults():
    assert SERIAL.keywords() == {"backend": "serial"}
    configuration = processes(4, spin_us=0.0, copy=True, spare_envs=1, overlap_resets=True, batch_size=2)
    assert PoolOptions(**configuration.keywords()).num_workers == 4
    assert str(configuration) == "process, 4 workers, batches of 2, 1 spare, overlap_resets, spin_us=0, copy=True"
