"""The search of `stepmill tune`, with injected times, and its result."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading

import gymnasium
import pytest

from stepmill.observe.catalog import EnvChoice
from stepmill.observe.tune import Tuner, make_request
from stepmill.observe.tune_choice import SERIAL, Configuration, EnvProfile, TuneRequest
from stepmill.observe.tune_result import code_text
from stepmill.spec.errors import EnvError, UsageError
from stepmill.spec.options import BackendName
from stepmill.testing import CountingEnv

PROCESSES = Configuration(backend=BackendName.PROCESS, num_workers=2)
PROFILE = EnvProfile(step_s=1e-3, cpu_share=0.5, obs_bytes=16)
COUNTING = EnvChoice("CountingEnv", CountingEnv, is_atari=False, is_function=True)


class FakeArena:
    """Returns injected rates, and moves the clock by the time of each turn."""

    def __init__(self, rate_of, now):
        self.rate_of, self.now = rate_of, now
        self.turns = []
        self.is_closed = False

    def measure(self, configuration, seconds):
        self.turns.append(configuration)
        self.now[0] += seconds
        return self.rate_of(configuration)

    def keep_only(self, configurations):
        pass

    def close(self):
        self.is_closed = True


def make_tuner(rate_of, *, profile=PROFILE, load=0.0, **of_request):
    now = [0.0]
    arena = FakeArena(rate_of, now)
    request = TuneRequest(**{"env": COUNTING, "num_envs": 8, "cores": 2, "baseline": PROCESSES, **of_request})
    tuner = Tuner(
        request,
        load=load,
        clock=lambda: now[0],
        profile_one=lambda _request, seconds: profile,
        make_arena=lambda _request: arena,
    )
    return tuner, arena


def run_tuner(rate_of, **settings):
    tuner, arena = make_tuner(rate_of, **settings)
    with tuner:
        tuner.run()
        result = tuner.result()
    assert arena.is_closed
    return result, arena


def threads_win(configuration):
    return 900.0 if configuration.backend is BackendName.THREAD else 500.0


def test_the_fastest_configuration_is_chosen():
    result, _ = run_tuner(threads_win)
    assert result.choice.configuration.backend is BackendName.THREAD
    assert result.gain == pytest.approx(1.8)
    assert result.keywords["backend"] == "thread"
    assert result.options.backend is BackendName.THREAD
    assert result.code.endswith(f"num_workers={result.choice.configuration.num_workers})")


def test_a_choice_that_is_slower_than_the_baseline_in_all_rounds_together_is_not_advised():
    tuner, _ = make_tuner(threads_win)
    with tuner:
        tuner.run()
        assert tuner.result().choice.configuration.backend is BackendName.THREAD
        for rates in tuner.rounds:
            rates[PROCESSES] = 2000.0
        result = tuner.result()
    assert result.choice.configuration == PROCESSES
    assert "none: this is what" in str(result)


def test_a_program_that_wants_batches_is_advised_batches_though_steps_of_all_envs_are_faster():
    result, _ = run_tuner(lambda each: 500.0 if each.batch_size else 1000.0, is_async=True)
    assert result.choice.configuration.batch_size
    assert result.gain == pytest.approx(0.5)
    assert "stepmill.Pool(" in result.code
    assert result.alternative.configuration == PROCESSES


def test_noise_that_all_share_does_not_decide():
    generator = random.Random(0)
    load = itertools.cycle([1.0, 0.2, 0.6, 0.9])
    state = {"round": 0.0, "seen": set()}

    def rate_of(configuration):
        if configuration in state["seen"]:
            state["seen"] = set()
        if not state["seen"]:
            state["round"] = next(load)
        state["seen"].add(configuration)
        return threads_win(configuration) * state["round"] * generator.uniform(0.9, 1.1)

    result, _ = run_tuner(rate_of)
    assert result.choice.configuration.backend is BackendName.THREAD


def test_use_serial_is_said_when_it_is_true():
    result, _ = run_tuner(lambda each: 100.0, profile=EnvProfile(step_s=5e-6))
    assert result.choice.configuration == SERIAL
    assert "  use serial\n" in str(result)
    assert result.code == 'import stepmill\n\nenvs = stepmill.VectorEnv([CountingEnv] * 8, backend="serial")'


def test_slow_configurations_are_dropped_and_turns_are_short():
    _, arena = run_tuner(threads_win)
    assert arena.turns.count(SERIAL) < arena.turns.count(PROCESSES)
    assert arena.now[0] < 60


def test_the_budget_ends_the_search():
    _, arena = run_tuner(threads_win, budget_s=2.0)
    assert arena.now[0] <= 2.0
    result, _ = run_tuner(threads_win, budget_s=1e-6)
    assert result.choice.steps_per_s is None
    assert result.gain is None
    assert "not measured" in str(result) or "none: this is" in str(result)


def test_a_busy_machine_is_mentioned():
    assert run_tuner(threads_win)[0].notes == ()
    (note,) = run_tuner(threads_win, load=1000.0)[0].notes
    assert "other programs use this machine" in note


def test_a_configuration_whose_envs_fail_is_left_out_and_named():
    def rate_of(configuration):
        if configuration.backend is BackendName.THREAD:
            raise EnvError("env 1 raised ValueError: not in threads", env_id=1)
        return 100.0

    result, _ = run_tuner(rate_of)
    assert result.choice.configuration.backend is not BackendName.THREAD
    assert any("failed, and was left out: env 1 raised" in note for note in result.notes)


def test_a_choice_that_fails_later_is_replaced():
    seen = []

    def rate_of(configuration):
        seen.append(configuration)
        if configuration.backend is BackendName.THREAD and configuration.spin_us is None and seen[-2].spin_us == 0:
            raise EnvError("env 1 raised ValueError: too late", env_id=1)
        return threads_win(configuration)

    result, _ = run_tuner(rate_of)
    assert result.choice.failure == ""
    assert any(trial.failure for trial in result.trials)


def test_an_env_that_fails_everywhere_is_an_error():
    def rate_of(configuration):
        raise EnvError("env 0 raised ValueError: no", env_id=0)

    with pytest.raises(EnvError, match="env 0 raised ValueError"):
        run_tuner(rate_of)


def test_a_function_that_cannot_be_pickled_leaves_two_backends():
    lock = threading.Lock()

    def make_env():
        return CountingEnv(int(lock.locked()))

    request = make_request(make_env, 4)
    assert request.baseline == SERIAL
    result, _ = run_tuner(threads_win, unpicklable=request.unpicklable, baseline=request.baseline)
    tried = {each.configuration.backend for each in result.trials}
    assert tried == {BackendName.SERIAL, BackendName.THREAD}
    (note,) = result.notes
    assert note.startswith("the function that makes the env cannot be pickled (TypeError: ")


def test_what_is_known_after_an_interrupt_is_a_result():
    turns = itertools.count()

    def rate_of(configuration):
        if next(turns) == 12:
            raise KeyboardInterrupt
        return threads_win(configuration)

    tuner, _ = make_tuner(rate_of)
    with tuner:
        with pytest.raises(KeyboardInterrupt):
            tuner.run()
        tuner.is_interrupted = True
        result = tuner.result()
    assert result.is_interrupted
    assert result.choice.configuration.backend is BackendName.THREAD
    assert json.loads(json.dumps(result.to_dict()))["interrupted"] is True


def test_a_turn_covers_episodes_if_resets_are_slow():
    env = EnvProfile(step_s=1e-4, reset_s=0.05, episode_steps=49, cpu_share=0.1)
    tuner, arena = make_tuner(threads_win, profile=env)
    measure, longest = arena.measure, []

    def note_and_measure(configuration, seconds):
        longest.append(seconds)
        return measure(configuration, seconds)

    arena.measure = note_and_measure
    with tuner:
        tuner.run()
    in_line_s = 8 * (49 * 1e-4 + 0.05)  # an episode of all envs, one after the other
    assert min(longest[:5]) > in_line_s


def test_batches_of_some_envs_come_with_the_best_alternative_in_step():
    result, _ = run_tuner(lambda each: 900.0 if each.batch_size else threads_win(each) / 1.5)
    assert result.batch_size == result.choice.configuration.batch_size is not None
    assert f"stepmill.Pool([CountingEnv] * 8, batch_size={result.batch_size}, " in result.code
    assert result.alternative.configuration.batch_size is None
    assert "stepmill.VectorEnv([CountingEnv] * 8" in result.alternative_code


def test_the_result_is_json_without_infinities():
    result, _ = run_tuner(threads_win)
    assert math.isinf(result.profile.episode_steps)
    found = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert found["choice"]["backend"] == "thread"
    assert found["profile"]["episode_steps"] is None
    assert found["gain"] == pytest.approx(1.8)
    assert "no episode ended" in str(result)


@pytest.mark.parametrize(
    "bad",
    [
        {"num_envs": 0},
        {"budget_s": 0},
        {"learner_s": -1},
        {"learner_s": math.nan},
        {"budget_s": math.inf},
        {"step_timeout_s": 0},
    ],
)
def test_numbers_out_of_range_are_refused(bad):
    with pytest.raises(UsageError, match="must be"):
        make_request(CountingEnv, **{"num_envs": 2, **bad})


def test_the_baseline_is_what_auto_runs():
    assert make_request("CartPole-v1", 8).baseline == SERIAL
    assert make_request("Acrobot-v1", 8).baseline.backend is BackendName.PROCESS
    assert make_request(CountingEnv, 1).baseline == SERIAL
    assert make_request(lambda: gymnasium.make("CartPole-v1"), 8).baseline == SERIAL


def test_the_printed_program_makes_the_env_as_it_was_measured():
    def text_of(choice, configuration=PROCESSES):
        return code_text(choice, configuration, 4)

    plain = EnvChoice("CartPole-v1", CountingEnv, is_atari=False, env_kwargs=(("a", 1),))
    call = (
        'envs = stepmill.make_vec("CartPole-v1", num_envs=4, env_kwargs={\'a\': 1}, backend="process", num_workers=2)'
    )
    assert text_of(plain).endswith(call)
    mine = EnvChoice("My-v0", CountingEnv, is_atari=False, module="my_envs")
    assert 'make_vec("my_envs:My-v0"' in text_of(mine)
    atari = EnvChoice("ALE/Pong-v5", CountingEnv, is_atari=True, module="ale_py")
    assert "make_vec(\"ale_py:ALE/Pong-v5\", num_envs=4, env_kwargs={'frameskip': 1}, wrappers=[preprocess]" in text_of(
        atari
    )
    in_batches = Configuration(backend=BackendName.PROCESS, num_workers=2, batch_size=2)
    assert "Pool([lambda: preprocess(gymnasium.make(" in text_of(atari, in_batches)
    spares = Configuration(backend=BackendName.PROCESS, num_workers=5, spare_envs=1)
    assert "VectorEnv([CountingEnv] * (4 + 1), " in text_of(COUNTING, spares)
    own = EnvChoice(
        "my_envs:MyEnv", CountingEnv, is_atari=False, module="my_envs", env_kwargs=(("a", 1),), is_function=True
    )
    assert text_of(own).startswith("import stepmill\nfrom my_envs import MyEnv\n\n")
    assert "VectorEnv([lambda: MyEnv(a=1)] * 4, " in text_of(own)
    nameless = make_request(lambda: None, 4).env
    assert "VectorEnv([make_env] * 4, " in text_of(nameless)
    for configuration in (PROCESSES, in_batches, spares, SERIAL):
        for choice in (atari, mine, nameless):
            compile(text_of(choice, configuration), "printed", "exec")
