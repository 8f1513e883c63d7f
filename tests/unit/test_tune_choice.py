"""Which configurations are compared, and which of them is chosen, from injected times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepmill.observe.tune_choice import (
    SERIAL,
    TIE,
    Limits,
    candidates,
    choose,
    explain,
    is_clearly_faster,
    is_settled,
    keep_better_half,
    paired_rates,
    paired_scores,
    shortlist,
    straggler_loss,
    variants,
)
from stepmill.pool.cost_model import Configuration, EnvProfile, Machine, predict
from stepmill.spec.options import BackendName
from stepmill.spec.stats_text import duration_text

TWO_CORES = Machine(2, learner_s=3e-4)
THREADS, PROCESSES, MORE, EIGHT = (
    Configuration(backend=BackendName(backend), num_workers=num_workers)
    for backend, num_workers in (("thread", 2), ("process", 2), ("process", 4), ("process", 8))
)
TINY = EnvProfile(steps_s=(5e-6,), episode_steps=100, reset_s=1e-5)
SLEEPING = EnvProfile(steps_s=(1e-2,), cpu_share=0.02)
SLOW_RESET = EnvProfile(steps_s=(1e-4,), reset_s=0.05, episode_steps=50, cpu_share=0.1)
IMAGES = EnvProfile(steps_s=(1e-3,), obs_bytes=100_000)
UNEVEN = EnvProfile(steps_s=(1e-4, 1e-4, 1e-4, 5e-3))


def best_predicted(profile, num_envs=8, machine=TWO_CORES, **limits):
    found = candidates(profile, machine, Limits(num_envs, **limits))
    return choose({each: predict(profile, machine, each, num_envs) for each in found})


def test_a_tiny_env_runs_in_line():
    assert best_predicted(TINY) == SERIAL


def test_an_env_that_sleeps_gets_a_worker_per_env():
    chosen = best_predicted(SLEEPING, 16)
    assert chosen.num_workers == 16
    assert chosen.backend is BackendName.THREAD


def test_an_env_that_computes_gets_a_worker_per_core():
    chosen = best_predicted(EnvProfile(steps_s=(1e-3,)), 16, Machine(4, learner_s=3e-4))
    assert (chosen.backend, chosen.num_workers) == (BackendName.PROCESS, 4)


def test_slow_resets_are_made_in_advance():
    chosen = best_predicted(SLOW_RESET, is_async=False)
    assert chosen.spare_envs > 0
    with_time_to_spare = replace(SLOW_RESET, reset_s=5e-3)
    found = candidates(with_time_to_spare, Machine(2, learner_s=1e-2), Limits(8))
    assert any(each.overlap_resets for each in found)


def test_envs_that_are_reset_together_need_a_spare_each():
    together = replace(SLOW_RESET, is_length_fixed=True)
    assert {each.spare_envs for each in candidates(together, TWO_CORES, Limits(8))} == {0, 8}
    in_turn, at_once = (predict(each, TWO_CORES, EIGHT, 8) for each in (SLOW_RESET, together))
    assert at_once > 2 * in_turn


def test_quick_resets_need_no_spares():
    assert not any(each.spare_envs or each.overlap_resets for each in candidates(IMAGES, TWO_CORES, Limits(8)))


def test_copies_are_tried_only_if_observations_are_large():
    assert [each.copy for each in variants(PROCESSES, IMAGES, 8)] == [False, True]
    assert [each.copy for each in variants(PROCESSES, TINY, 8)] == [False]
    assert variants(SERIAL, TINY, 8) == []


def test_batches_of_some_envs_are_tried_if_asked_for_or_if_durations_vary():
    def is_tried(profile, is_async):
        return {each.batch_size is not None for each in candidates(profile, TWO_CORES, Limits(8, is_async=is_async))}

    assert is_tried(UNEVEN, None) == {False, True}
    assert is_tried(IMAGES, None) == {False}
    assert is_tried(UNEVEN, False) == {False}
    assert is_tried(IMAGES, True) == {True}


def test_a_function_that_cannot_be_pickled_runs_in_line_or_in_threads():
    found = candidates(SLEEPING, TWO_CORES, Limits(8, can_pickle=False))
    assert {each.backend for each in found} == {BackendName.SERIAL, BackendName.THREAD}


def test_a_kernel_is_tried_where_one_exists():
    assert BackendName.KERNEL in {
        each.backend for each in candidates(replace(TINY, kernel_step_s=1e-7), TWO_CORES, Limits(8))
    }
    assert best_predicted(replace(TINY, kernel_step_s=1e-7), 64).backend is BackendName.KERNEL


def test_one_env_runs_in_line():
    assert candidates(SLEEPING, Machine(16), Limits(1)) == [SERIAL]


@given(
    st.sampled_from([TINY, SLEEPING, SLOW_RESET, IMAGES, UNEVEN]),
    st.integers(1, 40),
    st.integers(1, 16),
    st.sampled_from([None, True, False]),
)
def test_all_that_is_tried_is_among_every_configuration(profile, num_envs, cores, is_async):
    machine = Machine(cores)
    some = candidates(profile, machine, Limits(num_envs, is_async))
    every = candidates(profile, machine, Limits(num_envs, is_async, is_exhaustive=True))
    assert set(some) <= set(every)
    assert some
    for each in every:
        assert each.num_workers <= num_envs + each.spare_envs
        assert each.batch_size is None or 1 <= each.batch_size <= num_envs


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({SERIAL: 1.0, PROCESSES: 1.04}, SERIAL),
        ({SERIAL: 1.0, PROCESSES: 1.2}, PROCESSES),
        ({THREADS: 1.0, PROCESSES: 1.03, MORE: 1.0}, THREADS),
        ({PROCESSES: 1.0, MORE: 1.03}, PROCESSES),
        ({PROCESSES: 1.0, replace(THREADS, batch_size=4): 1.03}, PROCESSES),
        ({PROCESSES: 1.0, replace(PROCESSES, spin_us=0.0): 1.03}, PROCESSES),
    ],
)
def test_ties_go_to_the_simpler_configuration(scores, chosen):
    assert choose(scores) == chosen


@given(st.dictionaries(st.sampled_from([SERIAL, THREADS, PROCESSES, MORE, EIGHT]), st.floats(0.1, 10), min_size=1))
def test_the_choice_is_within_the_tie_of_the_best_and_is_never_dropped(scores):
    chosen = choose(scores)
    assert scores[chosen] >= (1 - TIE) * max(scores.values())
    kept = keep_better_half(scores)
    assert max(scores, key=lambda each: scores[each]) in kept
    assert len(kept) >= min(2, len(scores))


def test_a_round_on_a_busy_machine_changes_no_score():
    quiet = [{SERIAL: 100.0, PROCESSES: 150.0}] * 2
    busy = [{SERIAL: 10.0, PROCESSES: 15.0}]
    scores = paired_scores([*quiet, *busy], [SERIAL, PROCESSES])
    assert scores[PROCESSES] / scores[SERIAL] == pytest.approx(1.5)


def test_rounds_that_are_not_complete_count_only_if_there_is_no_other():
    complete, cut = {SERIAL: 100.0, PROCESSES: 150.0}, {SERIAL: 500.0}
    assert choose(paired_scores([complete, cut], [SERIAL, PROCESSES])) == PROCESSES
    assert paired_scores([cut], [SERIAL, PROCESSES]) == {SERIAL: 500.0}


def test_rates_are_corrected_for_rounds_on_a_busy_machine():
    rounds = [{SERIAL: 100.0, PROCESSES: 150.0}, {SERIAL: 100.0}, {SERIAL: 10.0, PROCESSES: 15.0}]
    assert paired_rates(rounds, SERIAL) == {SERIAL: 100.0, PROCESSES: pytest.approx(150.0)}
    assert paired_rates(rounds, MORE) == {SERIAL: 100.0, PROCESSES: 82.5}


@pytest.mark.parametrize(
    ("rates", "is_enough"),
    [
        ([1.0] * 5, False),  # too few rounds
        ([1.0] * 6, True),  # equal
        ([2.0, 1.9, 2.1, 2.0, 1.8, 2.2], True),  # far apart
        ([0.5, 2.0, 0.6, 1.5, 0.7, 1.9], False),  # noise
    ],
)
def test_two_configurations_are_compared_until_noise_does_not_decide(rates, is_enough):
    rounds = [{SERIAL: 1.0, PROCESSES: rate} for rate in rates]
    assert is_settled(rounds, SERIAL, PROCESSES) == is_enough


def test_a_variant_is_used_only_if_it_is_faster_by_more_than_noise():
    def is_used(rates):
        return is_clearly_faster([{SERIAL: 1.0, PROCESSES: rate} for rate in rates], PROCESSES, SERIAL)

    assert is_used([1.2, 1.21, 1.19, 1.2, 1.22, 1.18])
    assert not is_used([1.03] * 6)
    assert not is_used([0.8, 1.5, 1.2, 1.6, 0.7, 1.3])
    assert not is_used([2.0] * 5)


def test_the_shortlist_has_the_best_of_each_kind_and_what_is_required():
    predicted = {SERIAL: 1.0, THREADS: 10.0, PROCESSES: 30.0, MORE: 29.0, EIGHT: 28.0}
    assert shortlist(predicted, [SERIAL]) == [PROCESSES, MORE, SERIAL]
    assert shortlist(predicted, [EIGHT], most=1) == [PROCESSES, EIGHT]


def test_each_part_of_a_choice_has_its_reason():
    chosen = Configuration(backend=BackendName.PROCESS, num_workers=10, spare_envs=2)
    text = "\n".join(explain(chosen, SLOW_RESET, TWO_CORES, 8, {}.get))
    assert text.startswith("process: ")
    assert "num_workers=10: 1 env per worker" in text
    assert "spare_envs=2: resets take" in text
    assert explain(SERIAL, TINY, TWO_CORES, 8, {}.get)[0].startswith("serial: all 8 envs take")
    times = {replace(PROCESSES, copy=True): 1.25, replace(PROCESSES, spin_us=0.0): 1.01}
    reasons = explain(PROCESSES, IMAGES, TWO_CORES, 8, times.get)
    assert "copy=False: measured 1.25 times as fast as copy=True" in reasons
    assert "spin_us=None: spin_us=0.0 is as fast" in reasons


def test_durations_have_units():
    assert [duration_text(each) for each in (4.12e-6, 0.0123, 2.0)] == ["4.12 µs", "12.3 ms", "2 s"]


def test_rare_resets_are_no_reason_for_batches_of_some_envs():
    pong = EnvProfile(steps_s=(3.5e-4,), reset_s=4e-3, episode_steps=900)
    assert straggler_loss(pong, TWO_CORES, 8) < 0.1
    assert straggler_loss(UNEVEN, TWO_CORES, 8) > 0.2
    assert straggler_loss(IMAGES, TWO_CORES, 8) == pytest.approx(0, abs=1e-9)
