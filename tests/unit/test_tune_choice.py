"""Which configurations are compared, and which of them is chosen, from injected times."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmill.observe.catalog import EnvChoice
from stepmill.observe.tune_choice import (
    SERIAL,
    TIE,
    Configuration,
    EnvProfile,
    TuneRequest,
    choose,
    contenders,
    explain,
    neighbours,
    scores_of,
    starts,
)
from stepmill.spec.options import BackendName, PoolOptions
from stepmill.spec.stats_text import duration_text
from stepmill.testing import CountingEnv

COUNTING = EnvChoice("CountingEnv", CountingEnv, is_atari=False, is_function=True)
on_cores = partial(TuneRequest, env=COUNTING)
ON_TWO_CORES = on_cores(num_envs=8, cores=2)
THREADS, PROCESSES, MORE, EIGHT = (
    Configuration(backend=BackendName(backend), num_workers=num_workers)
    for backend, num_workers in (("thread", 2), ("process", 2), ("process", 4), ("process", 8))
)
TINY = EnvProfile(step_s=5e-6, episode_steps=100, reset_s=1e-5)
SLEEPING = EnvProfile(step_s=1e-2, cpu_share=0.02)
SLOW_RESET = EnvProfile(step_s=1e-4, reset_s=0.05, episode_steps=50, cpu_share=0.1)
IMAGES = EnvProfile(step_s=1e-3, obs_bytes=100_000)


def reachable(profile, request):
    found = starts(profile, request)
    for one in found:
        found += [each for each in neighbours(one, profile, request) if each not in found]
    return found


def test_each_backend_starts_with_a_worker_per_core_and_with_one_per_env_that_waits():
    assert starts(TINY, ON_TWO_CORES) == [SERIAL, THREADS, PROCESSES]
    assert [str(each) for each in starts(SLEEPING, on_cores(num_envs=16, cores=2))] == [
        "serial", "thread, 2 threads", "thread, 16 threads", "process, 2 workers", "process, 16 workers",
    ]  # fmt: skip


def test_one_env_runs_in_line():
    assert starts(SLEEPING, on_cores(num_envs=1, cores=16)) == [SERIAL]


def test_slow_resets_are_made_in_advance():
    spares = [each for each in neighbours(EIGHT, SLOW_RESET, ON_TWO_CORES) if each.spare_envs]
    assert [(each.spare_envs, each.num_workers) for each in spares] == [(5, 13), (8, 16)]
    assert replace(EIGHT, overlap_resets=True) in neighbours(EIGHT, SLOW_RESET, ON_TWO_CORES)
    assert not any(each.spare_envs or each.overlap_resets for each in neighbours(EIGHT, IMAGES, ON_TWO_CORES))


def test_copies_are_tried_only_if_observations_are_large():
    assert replace(PROCESSES, copy=True) in neighbours(PROCESSES, IMAGES, ON_TWO_CORES)
    assert replace(PROCESSES, copy=True) not in neighbours(PROCESSES, TINY, ON_TWO_CORES)
    assert neighbours(SERIAL, IMAGES, ON_TWO_CORES) == []


def test_batches_of_some_envs_are_tried_unless_they_are_refused():
    def sizes(is_async):
        return {each.batch_size for each in reachable(TINY, replace(ON_TWO_CORES, is_async=is_async))}

    assert sizes(None) == {None, 2, 4}
    assert sizes(False) == {None}
    assert sizes(True) == {2, 4}


def test_a_function_that_cannot_be_pickled_runs_in_line_or_in_threads():
    found = reachable(SLEEPING, replace(ON_TWO_CORES, unpicklable="no"))
    assert {each.backend for each in found} == {BackendName.SERIAL, BackendName.THREAD}


def test_a_kernel_is_tried_where_one_exists():
    assert BackendName.KERNEL in {each.backend for each in starts(TINY, replace(ON_TWO_CORES, kernel=CountingEnv))}
    assert BackendName.KERNEL not in {each.backend for each in starts(TINY, ON_TWO_CORES)}


@given(
    st.sampled_from([TINY, SLEEPING, SLOW_RESET, IMAGES]),
    st.integers(1, 40),
    st.integers(1, 16),
    st.sampled_from([None, True, False]),
)
def test_every_configuration_is_possible_and_reached_from_the_starts(profile, num_envs, cores, is_async):
    request = on_cores(num_envs=num_envs, cores=cores, is_async=is_async)
    every = reachable(profile, request)
    assert set(starts(profile, request)) <= set(every)
    assert len(every) == len(set(every)) > 0
    for each in every:
        assert 1 <= each.num_workers <= num_envs + each.spare_envs
        assert each.batch_size is None or 1 <= each.batch_size <= num_envs


def test_the_keywords_of_a_configuration_are_options_without_defaults():
    assert SERIAL.keywords() == {"backend": "serial"}
    configuration = replace(MORE, spin_us=0.0, copy=True, spare_envs=1, overlap_resets=True, batch_size=2)
    assert PoolOptions(**configuration.keywords()).num_workers == 4
    assert str(configuration) == "process, 4 workers, batches of 2, 1 spare, overlapped resets, spin_us=0, copy=True"


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({SERIAL: 1.0, PROCESSES: 1.04}, SERIAL),
        ({SERIAL: 1.0, PROCESSES: 1.2}, PROCESSES),
        ({THREADS: 1.0, PROCESSES: 1.03, MORE: 1.0}, THREADS),
        ({PROCESSES: 1.0, MORE: 1.03}, PROCESSES),
        ({PROCESSES: 1.0, replace(THREADS, batch_size=4): 1.15}, PROCESSES),
        ({PROCESSES: 1.0, replace(THREADS, batch_size=4): 1.3}, replace(THREADS, batch_size=4)),
        ({replace(MORE, batch_size=2): 1.2, replace(THREADS, batch_size=4): 1.0}, replace(MORE, batch_size=2)),
        ({PROCESSES: 1.0, replace(PROCESSES, spin_us=0.0): 1.1}, PROCESSES),
        ({PROCESSES: 1.0, replace(PROCESSES, spin_us=0.0): 1.3}, replace(PROCESSES, spin_us=0.0)),
    ],
)
def test_ties_go_to_the_simpler_configuration(scores, chosen):
    assert choose(scores) == chosen


@given(st.dictionaries(st.sampled_from([SERIAL, THREADS, PROCESSES, MORE, EIGHT]), st.floats(0.1, 10), min_size=1))
def test_the_choice_is_within_the_tie_of_the_best_and_is_never_dropped(scores):
    chosen = choose(scores)
    assert scores[chosen] >= (1 - TIE) * max(scores.values())
    kept = contenders([scores] * 10, [*scores])
    assert {each for each in scores if scores[each] > (1 - TIE / 2) * max(scores.values())} <= {*kept}


def test_a_round_on_a_busy_machine_changes_no_score():
    quiet = [{SERIAL: 100.0, PROCESSES: 150.0}] * 2
    busy = [{SERIAL: 10.0, PROCESSES: 15.0}]
    scores = scores_of([*quiet, *busy], [SERIAL, PROCESSES])
    assert scores[PROCESSES] / scores[SERIAL] == pytest.approx(1.5)


def test_rounds_that_are_not_complete_count_only_if_there_is_no_other():
    complete, cut = {SERIAL: 100.0, PROCESSES: 150.0}, {SERIAL: 500.0}
    assert choose(scores_of([complete, cut], [SERIAL, PROCESSES])) == PROCESSES
    assert scores_of([cut], [SERIAL, PROCESSES]) == {SERIAL: 500.0}


@pytest.mark.parametrize(
    ("rates", "has_left", "is_enough"),
    [
        ([1.0] * 5, True, False),  # too few rounds
        ([1.0] * 6, True, True),  # equal
        ([2.0, 1.9, 2.1, 2.0, 1.8, 2.2], False, True),  # far apart
        ([0.5, 2.0, 0.6, 1.5, 0.7, 1.9], True, False),  # noise
    ],
)
def test_two_configurations_are_compared_until_noise_does_not_decide(rates, has_left, is_enough):
    rounds = [{SERIAL: 1.0, PROCESSES: rate} for rate in rates]
    left = contenders(rounds, [SERIAL, PROCESSES])
    assert (SERIAL in left and PROCESSES in left) == has_left
    assert all(error < TIE / 2 for error in left.values()) == is_enough


def test_batches_that_gain_little_do_not_end_the_comparison_of_steps_of_all_envs():
    batches = replace(PROCESSES, batch_size=4)
    assert PROCESSES in contenders([{PROCESSES: 1.0, batches: 1.1}] * 10, [PROCESSES, batches])
    assert [*contenders([{PROCESSES: 1.0, batches: 1.3}] * 10, [PROCESSES, batches])] == [batches]


def test_each_part_of_a_choice_has_its_reason():
    chosen = Configuration(backend=BackendName.PROCESS, num_workers=10, spare_envs=2)
    text = "\n".join(explain(chosen, SLOW_RESET, ON_TWO_CORES, {}.get))
    assert text.startswith("process: ")
    assert "num_workers=10: 1 env per worker" in text
    assert "spare_envs=2: resets take" in text
    assert explain(SERIAL, TINY, ON_TWO_CORES, {}.get)[0].startswith("serial: 8 rows of")
    times = {SERIAL: 1.8, replace(PROCESSES, copy=True): 1.25, replace(PROCESSES, spin_us=0.0): 1.01}
    reasons = explain(PROCESSES, IMAGES, ON_TWO_CORES, times.get)
    assert reasons[0].endswith("(measured 1.8 times as fast as serial)")
    assert "copy=False: measured 1.25 times as fast as copy=True" in reasons
    assert "spin_us=None: spin_us=0.0 is as fast" in reasons


def test_durations_have_units():
    assert [duration_text(each) for each in (4.12e-6, 0.0123, 2.0)] == ["4.12 µs", "12.3 ms", "2 s"]
