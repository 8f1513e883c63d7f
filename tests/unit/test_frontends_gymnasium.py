"""What `VectorEnv` and `make_vec` check before, and beside, stepping."""

import contextlib
import copy
import multiprocessing
import pickle
from functools import partial

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec as GymnasiumSpec

import stepmill
from stepmill.frontends.gymnasium import make as make_module
from stepmill.frontends.gymnasium.errors import (
    ClosedVectorEnvError,
    MissingModuleError,
    NothingPendingError,
    PendingCallError,
    SpaceMismatchError,
    WaitTimeout,
)
from stepmill.frontends.gymnasium.spaces import batch_observations, check_spaces, read_spaces
from stepmill.spec.env import EnvSpec
from stepmill.spec.errors import BusyEnvError, ClosedPoolError, RecvTimeout, UsageError
from stepmill.spec.tree import Opaque
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun, keep_closed

BOX, WIDE, LONG = spaces.Box(0, 1, (2,)), spaces.Box(0, 5, (2,)), spaces.Box(0, 1, (3,))
TWO, THREE = spaces.Discrete(2), spaces.Discrete(3)


@pytest.fixture
def cartpoles():
    yield from keep_closed(
        lambda num_envs=3, **kwargs: stepmill.make_vec("CartPole-v1", num_envs, backend="serial", **kwargs)
    )


# ---- errors of two families


@pytest.mark.parametrize(
    ("error", "ours", "theirs"),
    [
        (PendingCallError("a", "step"), BusyEnvError, gymnasium.error.AlreadyPendingCallError),
        (NothingPendingError("a", "step"), UsageError, gymnasium.error.NoAsyncCallError),
        (ClosedVectorEnvError("a"), ClosedPoolError, gymnasium.error.ClosedEnvironmentError),
        (WaitTimeout("a", env_ids=[1], timeout_s=2.0), RecvTimeout, multiprocessing.TimeoutError),
        (SpaceMismatchError("a"), UsageError, RuntimeError),
        (MissingModuleError("a"), UsageError, ModuleNotFoundError),
    ],
)
def test_errors_are_ours_and_gymnasiums_and_pickle(error, ours, theirs):
    assert isinstance(error, ours)
    assert isinstance(error, theirs)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), again.__dict__) == (type(error), "a", error.__dict__)


# ---- spaces


def test_spaces_that_came_as_the_same_bytes_are_one_object():
    specs = [EnvSpec(observation=Opaque(), action=Opaque(), spaces=pickle.dumps((BOX, TWO))) for _ in range(3)]
    first, *others = read_spaces(specs)
    assert first == (BOX, TWO)
    assert all(pair is first for pair in others)


def test_observation_spaces_batch_as_the_mode_says():
    batched, single = batch_observations([BOX, WIDE], "different")
    assert single is BOX
    assert batched == spaces.Box(np.zeros((2, 2), "f4"), np.array([[1, 1], [5, 5]], "f4"))
    assert batch_observations([BOX, BOX], "same")[0] == spaces.Box(0, 1, (2, 2))
    assert batch_observations([BOX, WIDE], (LONG, WIDE)) == (LONG, WIDE)


@pytest.mark.parametrize("mode", ["all", (BOX,), None, 3])
def test_an_unknown_observation_mode_is_refused(mode):
    with pytest.raises(UsageError, match="is invalid; give 'same', 'different', or a tuple"):
        batch_observations([BOX], mode)


def test_a_tuple_of_other_things_is_a_type_error():
    with pytest.raises(TypeError, match="tuple of Box and int; give two Spaces"):
        batch_observations([BOX], (BOX, 3))


@pytest.mark.parametrize(
    ("pairs", "is_same", "text"),
    [
        (
            [(BOX, TWO), (BOX, TWO), (WIDE, TWO)],
            True,
            "env 2 has the observation space .* use observation_mode='different'",
        ),
        ([(BOX, TWO), (LONG, TWO)], False, "env 1 has the observation space .* which differs in structure"),
        ([(BOX, TWO), (spaces.Box(0, 1, (2,)), THREE)], True, "env 1 has the action space .* make all action"),
    ],
)
def test_an_env_whose_spaces_differ_is_named(pairs, is_same, text):
    with pytest.raises(SpaceMismatchError, match=text):
        check_spaces(pairs, BOX, is_same=is_same)


def test_bounds_may_differ_where_the_mode_allows_it():
    check_spaces([(BOX, TWO), (WIDE, TWO)], BOX, is_same=False)


# ---- make_vec


def test_a_spec_makes_the_same_vector_env_again(cartpoles):
    envs = cartpoles(2, sutton_barto_reward=True, copy=True)
    assert envs.spec.id == "CartPole-v1"
    assert envs.spec.kwargs == {
        "sutton_barto_reward": True,
        "num_envs": 2,
        "vector_kwargs": {"backend": "serial", "copy": True},
    }
    again = stepmill.make_vec(envs.spec)
    assert (again.num_envs, again.copy, again.spec) == (2, True, envs.spec)
    again.close()
    assert repr(envs) == "VectorEnv(CartPole-v1, num_envs=2, backend='serial')"
    assert (
        gymnasium.spec("CartPole-v1").kwargs.keys()
        == {"sutton_barto_reward"} & gymnasium.spec("CartPole-v1").kwargs.keys()
    )


def test_the_arguments_of_gymnasiums_make_go_to_it(cartpoles):
    arguments = {"max_episode_steps": 3, "disable_env_checker": True, "render_mode": "rgb_array"}
    envs = cartpoles(2, **arguments)
    theirs = gymnasium.make_vec("CartPole-v1", 2, "sync", **arguments)
    assert [spec.max_episode_steps for spec in envs.get_attr("spec")] == [3, 3]
    assert envs.call("get_wrapper_attr", "spec") == theirs.call("get_wrapper_attr", "spec")
    assert envs.render_mode == "rgb_array"
    assert envs.spec.kwargs.keys() - {"vector_kwargs"} == theirs.spec.kwargs.keys() - {"vectorization_mode"}
    theirs.close()


@pytest.mark.parametrize(("mode", "backend"), [("sync", "serial"), ("async", "process")])
@pytest.mark.parametrize("as_enum", [False, True])
def test_a_vectorization_mode_of_gymnasium_chooses_the_backend(mode, backend, as_enum):
    asked = gymnasium.VectorizeMode(mode) if as_enum else mode
    envs = stepmill.make_vec(
        "CartPole-v1", 2, asked, {"shared_memory": True, "copy": True, "context": None}, [_unwrapped]
    )
    assert envs._pool.options.backend == backend
    assert envs.copy
    again = stepmill.make_vec(envs.spec)
    assert again._pool.options.backend == backend
    for each in (envs, again):
        each.close()


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [
        ({"num_envs": 8}, "serial"),
        ({"num_envs": 16, "copy": True, "sutton_barto_reward": True}, "serial"),
        ({"num_envs": 17}, "serial"),
        ({"num_envs": 18}, "process"),
        ({"num_envs": 2, "on_fault": "truncate"}, "process"),
        ({"num_envs": 2, "num_workers": 2}, "process"),
        ({"num_envs": 2, "backend": "process"}, "process"),
        ({"num_envs": 2, "vectorization_mode": "async"}, "process"),
        ({"num_envs": 2, "wrappers": [gymnasium.Wrapper]}, "process"),
        ({"num_envs": 2, "render_mode": "rgb_array"}, "process"),
        ({"num_envs": 2, "render_mode": None}, "serial"),
        ({"num_envs": 2, "id": "Acrobot-v1"}, "process"),
        ({"num_envs": 2, "options": stepmill.PoolOptions(backend="thread")}, "thread"),
    ],
)
def test_tiny_envs_run_in_line_unless_something_speaks_for_processes(arguments, backend):
    envs = stepmill.make_vec(**{"id": "CartPole-v1", **arguments})
    assert envs._pool.options.backend == backend
    assert "backend" not in envs.spec.kwargs.get("vector_kwargs", {}) or "backend" in arguments
    envs.close()


def _unwrapped(env):
    return env.unwrapped


def test_options_are_keywords_of_make_vec(cartpoles):
    options = cartpoles(
        2, on_fault="truncate", tuning={"slots": 2}, options=stepmill.PoolOptions(restarts={"max_restarts": 3})
    )._pool.options
    assert (options.on_fault, options.tuning.slots, options.restarts.max_restarts) == ("truncate", 2, 3)


def test_a_typo_in_an_option_of_make_vec_names_the_nearest():
    with pytest.raises(stepmill.EnvError, match=r"on_faul'.*did you mean on_fault") as caught:
        stepmill.make_vec("CartPole-v1", 64, backend="serial", on_faul="truncate")
    assert len(str(caught.value).partition("where it raised")[0]) < 1500
    assert str(caught.value).count("Traceback (most recent call last)") <= 2  # of the cause, and of gymnasium.make


def test_a_typo_in_an_argument_of_make_vec_names_the_nearest_and_others_get_no_suggestion():
    with pytest.raises(stepmill.EnvError, match=r"num_env'.*did you mean num_envs\?"):
        stepmill.make_vec("CartPole-v1", num_env=4)
    with pytest.raises(stepmill.EnvError) as raised:
        stepmill.make_vec("CartPole-v1", 2, gravity=3, backend="serial")
    assert "did you mean" not in str(raised.value)


def test_a_function_in_place_of_a_list_is_refused_with_what_to_write():
    with pytest.raises(UsageError, match=r"env_fns is a function; give a list .*: \[make_env\] \* 8"):
        stepmill.VectorEnv(lambda: gymnasium.make("CartPole-v1"))


@pytest.mark.parametrize("given", [(4,), (4, "spawn"), (stepmill.PoolOptions(),)])
def test_options_by_position_are_refused_with_what_to_write(given):
    with pytest.raises(UsageError, match=r"by position.*VectorEnv\(env_fns, num_workers=4\)") as caught:
        stepmill.VectorEnv([lambda: gymnasium.make("CartPole-v1")] * 2, *given)
    assert isinstance(caught.value, TypeError)


@pytest.mark.parametrize("options", [3, [("low", 1)], "low"])
def test_options_of_a_reset_that_are_no_mapping_are_refused(cartpoles, options):
    envs = cartpoles(2)
    for reset in (envs.reset, envs.reset_async):
        with pytest.raises(UsageError, match=r"reset\(options=.*\) is a .*; give a dict, or None"):
            reset(options=options)


def test_wrappers_go_around_every_env(cartpoles):
    envs = cartpoles(2, wrappers=[lambda env: gymnasium.wrappers.TransformReward(env, lambda reward: 3 * reward)])
    envs.reset(seed=0)
    assert envs.step(np.array([0, 1]))[1].tolist() == [3, 3]


def test_an_argument_named_like_ours_reaches_the_env_by_env_kwargs(cartpoles):
    with pytest.raises(stepmill.EnvError, match="copy"):
        cartpoles(2, env_kwargs={"copy": 3})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"vectorization_mode": "async"},
            "vectorization_mode='async' means backend='process', which contradicts backend='serial'",
        ),
        ({"vectorization_mode": "vector_entry_point"}, "'vector_entry_point' is for envs that are vector envs already"),
        ({"vectorization_mode": "fast"}, "vectorization_mode='fast' is invalid; give 'sync', 'async' or None"),
        ({"max_concurrency": 0}, "max_concurrency=0 must be a whole number"),
        ({"max_concurrency": 2.0}, "max_concurrency=2.0 must be a whole number"),
        ({"max_concurrency": 1, "num_workers": 1}, "max_concurrency and num_workers mean the same"),
        (
            {"vector_kwargs": {"max_concurrency": 1}, "options": stepmill.PoolOptions(num_workers=1)},
            "give one of the two",
        ),
        ({"worker": print}, "which .worker. cannot replace"),
        ({"options": {"copy": True}}, "options is a dict; give stepmill.PoolOptions"),
        ({"vector_kwargs": {"backend": "serial"}}, "got backend both as a keyword"),
        ({"gravity": 1, "env_kwargs": {"gravity": 2}}, "got gravity both as a keyword"),
        ({"options": stepmill.PoolOptions(backend="thread")}, "backend is given twice: 'serial', and 'thread'"),
    ],
)
def test_invalid_arguments_are_refused(cartpoles, arguments, text):
    with pytest.raises(UsageError, match=text):
        cartpoles(**{"num_envs": 2, **arguments})


@pytest.mark.parametrize("where", ["keyword", "vector_kwargs"])
def test_max_concurrency_of_gymnasium_is_the_number_of_workers(where):
    given = {"max_concurrency": np.int64(2)}
    arguments = given if where == "keyword" else {"vector_kwargs": given}
    with contextlib.closing(stepmill.make_vec("CartPole-v1", 3, **arguments, backend="thread")) as envs:
        assert len(envs.stats().workers) == 2


def test_an_id_with_a_number_of_envs_is_sent_to_make_vec():
    for make in (stepmill.VectorEnv, stepmill.Pool):
        with pytest.raises(UsageError, match=r"stepmill.make_vec\(.*, num_envs=8\)"):
            make("CartPole-v1", num_envs=2)


def test_a_closed_vector_env_can_be_pickled_and_an_open_one_says_why_not(cartpoles):
    envs = cartpoles(2)
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="a VectorEnv that is open cannot be pickled"):
            copied(envs)
    envs.close()
    again = pickle.loads(pickle.dumps(envs))
    assert (again.num_envs, again.single_action_space, again.spec) == (2, envs.single_action_space, envs.spec)
    again.close()
    for method in (again.reset, again.stats):
        with pytest.raises(ClosedPoolError, match="make a new VectorEnv"):
            method()


@pytest.mark.parametrize("num_envs", ["4", 2.5, True, 0], ids=repr)
def test_a_number_of_envs_is_a_whole_number_wherever_it_is_given(num_envs):
    def make():
        raise AssertionError("an env is made")

    for call in (
        lambda: stepmill.make_vec("CartPole-v1", num_envs),
        lambda: stepmill.AsyncPool(make, num_envs=num_envs),
        lambda: stepmill.evaluate(len, make, seeds=range(2), num_envs=num_envs),
        lambda: stepmill.tune(make, num_envs),
    ):
        with pytest.raises(UsageError, match=rf"num_envs={num_envs!r} must be a whole number"):
            call()


@pytest.mark.parametrize(
    ("env_id", "error", "text"),
    [
        ("CartPoll-v1", gymnasium.error.NameNotFound, "Did you mean: `CartPole`?"),
        ("CartPole-v9", gymnasium.error.VersionNotFound, "v9"),
        ("no_such_module_here:Env-v0", ModuleNotFoundError, "module 'no_such_module_here', which should register"),
        (3, TypeError, "id=3 is a int"),
        ("not an id!", gymnasium.error.Error, "Malformed"),
    ],
)
def test_an_unknown_id_is_refused_before_anything_starts(env_id, error, text):
    with pytest.raises(error, match=text):
        stepmill.make_vec(env_id, 2)


def test_an_id_may_name_the_module_that_registers_it():
    envs = stepmill.make_vec("gymnasium.envs:CartPole-v1", 2, backend="serial")
    assert envs.spec.id == "CartPole-v1"
    envs.close()


def test_an_id_without_version_is_the_latest_and_says_so():
    with pytest.warns(UserWarning, match="the latest, CartPole-v1, is used"):
        stepmill.make_vec("CartPole", 1, backend="serial").close()
    with pytest.warns(DeprecationWarning, match="CartPole-v0 is out of date"):
        stepmill.make_vec("CartPole-v0", 1, backend="serial").close()


def test_a_spec_without_a_single_env_is_refused():
    with pytest.raises(UsageError, match="Odd-v0 has no entry point"):
        stepmill.make_vec(GymnasiumSpec("Odd-v0", vector_entry_point="a:b"), 2)


# ---- one thing at a time


def test_everything_is_refused_while_a_step_is_pending(cartpoles):
    envs = begun(cartpoles(2))
    envs.step_async(np.array([0, 1]))
    for use in (
        lambda: envs.step(np.array([0, 1])),
        lambda: envs.step_async(np.array([0, 1])),
        envs.reset,
        envs.reset_async,
        lambda: envs.call("gravity"),
        lambda: envs.get_attr("gravity"),
        lambda: envs.set_attr("gravity", 1),
        envs.render,
    ):
        with pytest.raises(PendingCallError, match="while a step is pending; call step_wait") as caught:
            use()
        assert caught.value.name == "step"
    with pytest.raises(NothingPendingError, match="no reset is pending"):
        envs.reset_wait()
    assert envs.step_wait()[0].shape == (2, 4)
    envs.reset_async()
    with pytest.raises(PendingCallError, match="while a reset is pending; call reset_wait"):
        envs.step_async(np.array([0, 1]))


@pytest.mark.parametrize("name", ["step", "reset", "close"])
def test_the_envs_api_cannot_be_called_behind_the_engines_back(cartpoles, name):
    with pytest.raises(UsageError, match=f"use {name}\\(\\) of the vector env"):
        cartpoles(2).call(name)


# ---- batched envs


def sync_cartpoles(num_envs=2, **kwargs):
    return gymnasium.vector.SyncVectorEnv([lambda: gymnasium.make("CartPole-v1")] * num_envs, **kwargs)


def test_batched_envs_are_as_many_rows_as_they_have():
    envs = stepmill.VectorEnv([sync_cartpoles] * 2, backend="serial")
    flat = stepmill.make_vec("CartPole-v1", 4, backend="serial")
    assert envs.num_envs == 4
    assert envs.observation_space == flat.observation_space
    assert np.array_equal(envs.reset(seed=3)[0], flat.reset(seed=3)[0])
    actions = np.array([0, 1, 1, 0])
    for ours, theirs in zip(envs.step(actions)[:4], flat.step(actions)[:4], strict=True):
        assert np.array_equal(ours, theirs)
    envs.set_attr("gravity", [1.0, 2.0, 3.0, 4.0])
    assert envs.get_attr("gravity") == (1.0, 2.0, 3.0, 4.0)
    mask = np.array([False, True, False, False])
    old = envs.step(actions)[0].copy()
    new = envs.reset(seed=3, options={"reset_mask": mask})[0]
    assert np.array_equal(new[~mask], old[~mask])
    assert np.array_equal(new[1], flat.reset(seed=3)[0][1])
    envs.close()
    flat.close()


def test_batched_envs_must_reset_themselves_in_the_mode_that_was_asked_for():
    with pytest.raises(
        UsageError,
        match="batched envs have autoreset_mode='NextStep', but the vector env has autoreset_mode='SameStep'",
    ):
        stepmill.VectorEnv([sync_cartpoles] * 2, backend="serial", autoreset_mode="SameStep")


@pytest.mark.parametrize("make", [gymnasium.vector.SyncVectorEnv, partial(stepmill.VectorEnv, backend="serial")])
def test_the_envs_are_at_hand_on_the_serial_backend_as_in_a_sync_vector_env(make):
    with contextlib.closing(make([CountingEnv] * 2)) as envs:
        assert [type(env) for env in envs.envs] == [CountingEnv, CountingEnv]
        envs.envs[1].unwrapped.note = "own"
        envs.envs[0].note = "first"
        assert envs.get_attr("note") == ("first", "own")


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_close_takes_any_number_of_seconds_and_refuses_what_is_none(backend):
    envs = stepmill.VectorEnv([CountingEnv] * 2, backend=backend)
    for timeout in (-1, "x", float("nan")):
        with pytest.raises(UsageError, match="must be a number of seconds"):
            envs.close(timeout=timeout)
    envs.close(timeout=float("inf"))
    assert envs.closed
    with pytest.raises(ClosedPoolError):
        envs.stats()


def test_an_env_object_is_not_replaced_in_silence():
    with stepmill.VectorEnv([CountingEnv] * 2, backend="serial") as envs, pytest.raises(TypeError):
        envs.envs[0] = CountingEnv()


def test_envs_in_workers_are_answered_with_the_methods_that_reach_them():
    with stepmill.VectorEnv([CountingEnv] * 2, backend="thread") as envs:
        with pytest.raises(AttributeError, match=r"no attribute 'envs'; .*get_attr\(name\).*call\(name.*'serial'"):
            _ = envs.envs
        assert not hasattr(envs, "_anything")


def test_ids_of_ale_name_the_extra(monkeypatch):
    monkeypatch.setattr(make_module, "find_module", lambda name: None)
    monkeypatch.setattr(make_module, "registry", {})
    with pytest.raises(
        stepmill.MissingExtraError, match=r"ale_py is not installed; run: pip install 'stepmill\[atari\]'"
    ):
        stepmill.make_vec("ALE/Pong-v5", num_envs=2)
