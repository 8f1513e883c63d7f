"""The table of differences of docs/switching/torchrl.md, each row run with TorchRL's classes and with ours."""

from __future__ import annotations

import contextlib
import copy
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import gymnasium
import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

import torchrl.envs  # noqa: E402 - only if TorchRL is there
from tensordict import TensorDict  # noqa: E402
from torchrl.data import Unbounded  # noqa: E402
from torchrl.envs import SerialEnv, TransformedEnv, set_gym_backend  # noqa: E402
from torchrl.testing.mocking_classes import CountingEnv, CountingEnvWithString  # noqa: E402

from stepmill.frontends import torchrl as frontend  # noqa: E402
from stepmill.spec.errors import EnvError, EnvTimeout, SpecMismatch, UsageError, WorkerDied  # noqa: E402
from tests.originals.either import fixture_of  # noqa: E402
from tests.originals.rows import Rows  # noqa: E402
from tests.originals.torchrl.sides import (  # noqa: E402
    MARKS,
    Fails,
    Maker,
    NoTruncation,
    Plain,
    Sleeps,
    act,
    cartpole,
    counted,
    filled,
    of,
    scaled,
    use_gymnasium,
)

pytestmark = MARKS
row = Rows("torchrl")


make = fixture_of(Maker)


@pytest.fixture(autouse=True)
def with_gymnasium(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gymnasium(monkeypatch)


# ---- arguments -------------------------------------------------------------------------------------------


@row("First arguments of `StepmillEnv`")
def test_the_first_arguments() -> None:
    with pytest.raises(TypeError, match="ParallelEnv has TorchRL's arguments"):
        frontend.StepmillEnv(2, cartpole)  # type: ignore[arg-type,call-arg,misc]
    assert SerialEnv(2, cartpole).num_workers == 2


@row("`AsyncEnvPool`: `env_makers`")
@row("`AsyncEnvPool`: `env_batch_sizes`")
def test_arguments_of_asynchronous_envs(make: Maker) -> None:
    pool = make.asynchronous()
    names = ("env_batch_sizes", "exchange_keys", "resolved_exchange")
    assert [hasattr(type(pool), name) for name in names] == [not make.is_ours] * 3
    if not make.is_ours:
        make.made.append(torchrl.envs.AsyncEnvPool([cartpole], backend="threading", stack="lazy"))
        return
    for name in ("stack", "exchange", "worker_affinity"):
        with pytest.raises(UsageError, match=name):
            frontend.AsyncStepmillEnv([cartpole], **{name: "lazy"})


@row("`non_blocking`, `select_and_clone`")
@row("`start()`, `is_closed`")
def test_buffers_and_starts(make: Maker) -> None:
    env = make.parallel(cartpole)
    assert [hasattr(type(env), name) for name in ("non_blocking", "select_and_clone")] == [not make.is_ours] * 2
    assert env.is_closed is not make.is_ours
    env.start()
    assert env.is_closed is False


@row("`env[index]`")
def test_views(make: Maker) -> None:
    env = make.parallel(cartpole)
    env.reset()
    assert (type(env[1:]) is type(env)) is not make.is_ours
    with make.only_ours(NotImplementedError):
        assert env[torch.tensor([True, False]).numpy()].batch_size == (1,)
    with pytest.raises(TypeError if make.is_ours else NotImplementedError):
        env[0] = cartpole()


@row("`git_url`, `libname`, `available_envs`")
@row("`MultiThreadedEnv`: `categorical_action_encoding`")
@row("`create_env_kwargs` of `MultiThreadedEnv`")
def test_parts_of_multi_threaded_envs(make: Maker) -> None:
    given = {"num_threads": 1}
    env = make.threaded(2, "CartPole-v1", create_env_kwargs=given)
    names = ("git_url", "libname", "available_envs", "wrapper_frame_skip")
    assert [hasattr(env, name) for name in names] == [not make.is_ours] * 4
    assert env.action_spec.shape == (2,)
    assert (given == {"num_threads": 1}) is make.is_ours
    with make.only_ours(TypeError):
        assert make.threaded(2, "CartPole-v1", categorical_action_encoding=False).action_spec.shape == (2, 2)


@row("`mp_start_method`, `num_sub_threads`")
@row("`metadata_from_workers`, `daemon`")
@row("`shutdown_timeout`")
@row("`share_individual_td`, `shared_memory`")
@row("`configure_parallel()`")
@row("Pickling an env")
def test_arguments_of_processes(make: Maker) -> None:
    env = make.module.ParallelEnv(2, cartpole, mp_start_method="fork", num_sub_threads=1, daemon=True)
    make.made.append(env)
    if make.is_ours:
        assert (env.pool.options.context, env.pool.options.workers.threads) == ("fork", 1)
        assert frontend.ParallelEnv(1, cartpole, options=None, envs_per_worker=1).pool.options.context == "forkserver"
    with make.refuses(match="shutdown_timeout"):
        make.parallel(cartpole, shutdown_timeout=3.0)
    make.parallel(cartpole, share_individual_td=False)
    for keywords in ({"share_individual_td": True}, {"use_buffers": False}, {"num_threads": 2}, {"consolidate": False}):
        with make.refuses(match=next(iter(keywords))):
            make.parallel(cartpole, **keywords)
    with make.refuses(match="the workers have been started"):
        env.configure_parallel(num_threads=2)
    env.reset()
    with make.only_ours(TypeError):
        make.made.append(pickle.loads(cloudpickle.dumps(env)))


@row("`serial_for_single`")
def test_one_env(make: Maker) -> None:
    env = make.module.ParallelEnv(1, cartpole, serial_for_single=True)
    make.made.append(env)
    assert isinstance(env, SerialEnv) is not make.is_ours
    assert not make.is_ours or env.pool.options.backend == "serial"


@row("Overriding ")
@pytest.mark.parametrize(("name", "method"), [("ParallelEnv", "_start_workers"), ("MultiThreadedEnv", "_build_env")])
def test_these_methods_may_not_be_overridden(make: Maker, name: str, method: str) -> None:
    cls = getattr(make.module, name)
    calls = []

    def own(self: Any, *args: Any, **keywords: Any) -> Any:
        calls.append(1)
        return getattr(cls, method)(self, *args, **keywords)

    sub = type("Own", (cls,), {method: own})
    with make.refuses(TypeError, f"Own overrides {method}"):
        make.made.append(sub(2, cartpole, mp_start_method="fork") if name == "ParallelEnv" else sub(2, "CartPole-v1"))
        make.made[-1].reset()
    assert bool(calls) is not make.is_ours


@row("`frame_skip`")
def test_frame_skip(make: Maker) -> None:
    env = make.threaded(2, "CartPole-v1", frame_skip=3)
    assert isinstance(env, TransformedEnv) is not make.is_ours
    assert act(env, env.reset())["reward"].tolist() == [3, 3]


@row("`env.update_kwargs(...)`")
def test_new_arguments_of_envs(make: Maker) -> None:
    env = make.here(counted)
    env.reset()
    env.update_kwargs({"max_steps": 1})
    ends = act(env, env.reset())["done"].all()
    assert bool(ends) is make.is_ours
    env.close()
    assert act(env, env.reset())["done"].all()


@row("`env.reset(seed=s)`")
def test_seeds_of_one_reset(make: Maker) -> None:
    env = make.here(cartpole)
    first = env.reset(seed=3)["observation"]
    assert bool((first[0] == first[1]).all()) is not make.is_ours
    expected = gymnasium.make("CartPole-v1").reset(seed=3)[0]
    assert np.array_equal(first[0].numpy(), expected) is not make.is_ours
    if make.is_ours:
        with pytest.raises(UsageError, match="takes seed and options"):
            env.reset(list_of_kwargs=[{"other": 1}] * 2)


@row("`set_seed(s)`")
def test_seeds() -> None:
    set_gym_backend("gymnasium").set()
    envs = [SerialEnv(2, cartpole), frontend.StepmillEnv([cartpole] * 2, backend="serial")]
    following = [env.set_seed(3) for env in envs]
    observations = [env.reset()["observation"] for env in envs]
    assert following[0] != following[1]
    assert not torch.equal(observations[0], observations[1])
    envs += [SerialEnv(2, CountingEnv), frontend.ParallelEnv(2, CountingEnv, backend="serial")]
    for env, is_seeded_by_reset in zip(envs[2:], (False, True), strict=True):
        env.set_seed(3)  # of this env, it calls torch.manual_seed
        torch.manual_seed(4)
        env.reset()
        assert (torch.initial_seed() != 4) is is_seeded_by_reset
    for env in envs:
        env.close()


@row("An attribute that the envs do not have")
def test_an_attribute_that_does_not_exist(make: Maker) -> None:
    env = make.parallel(cartpole)
    env.reset()
    assert hasattr(env, "no_such") is not make.is_ours
    with pytest.raises(AttributeError if make.is_ours else EOFError):
        env.no_such()
    with make.only_ours(Exception):  # BrokenPipeError or RuntimeError
        assert env.reset().shape == (2,)


@row("`BATCHED_PIPE_TIMEOUT`")
@row("An env exceeds its deadline")
def test_an_env_that_exceeds_its_deadline(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHED_PIPE_TIMEOUT", "2")
    monkeypatch.setattr("torchrl._utils.BATCHED_PIPE_TIMEOUT", 2.0)
    env = make.parallel(of(Sleeps, make))
    first = env.reset()
    with pytest.raises(RuntimeError, match="Failed to run all workers within the") as caught:
        act(env, first)
    assert isinstance(caught.value, EnvTimeout) is make.is_ours


# ---- results ---------------------------------------------------------------------------------------------


@row("Actions of a `Discrete` space that does not begin at 0")
def test_actions_that_do_not_begin_at_0(make: Maker) -> None:
    action = gymnasium.spaces.Discrete(3, start=5)
    env = make.here(
        of(partial(Plain, None, action), make, categorical_action_encoding=True),
        **{"categorical_action_encoding": True} if make.is_ours else {},
    )
    lowest = min(int(number) for number in env.action_spec.rand().unique()) if make.is_ours else 0
    assert (lowest >= 5) is make.is_ours
    assert make.is_ours or env.action_spec.is_in(torch.zeros(2, dtype=torch.int64))


@row("`Tuple` spaces")
def test_tuple_spaces(make: Maker) -> None:
    pair = gymnasium.spaces.Tuple([gymnasium.spaces.Box(-1, 1, (2,)), gymnasium.spaces.Discrete(3)])
    with make.only_ours(Exception):
        env = make.here(of(partial(Plain, pair), make))
        assert {*env.reset()["observation"].keys()} == {"0", "1"}


@row("A masked reset with only `_reset`")
def test_a_masked_reset(make: Maker) -> None:
    env = make.here(cartpole)
    before = env.reset()["observation"]
    after = env.reset(TensorDict({"_reset": torch.tensor([[True], [False]])}, [2]))["observation"]
    assert torch.equal(after[1], before[1]) is make.is_ours
    assert make.is_ours or not after[1].any()


@row("EnvPool: the step after the end of an episode")
@row("`env.obs` of `MultiThreadedEnvWrapper`")
def test_the_step_after_the_end(make: Maker) -> None:
    env = make.threaded(1, "CartPole-v1", create_env_kwargs={"max_episode_steps": 3})
    _, td = env.step_and_maybe_reset(env.rand_action(env.reset()))
    assert ("reward" in env.obs.keys()) is not make.is_ours  # noqa: SIM118
    rewards = []
    for _ in range(7):
        stepped, td = env.step_and_maybe_reset(env.rand_action(td))
        rewards.append(stepped["next", "reward"].item())
    assert (0.0 in rewards) is not make.is_ours


@row("Envs of TorchRL without `truncated`")
@row("Rewards of dtype float64")
def test_flags_and_rewards(make: Maker) -> None:
    env = make.here(NoTruncation)
    after = act(env, env.reset())
    assert ("truncated" in after.keys()) is make.is_ours  # noqa: SIM118
    assert after["reward"].dtype is (torch.float32 if make.is_ours else torch.float64)


@row("Infos")
def test_infos(make: Maker) -> None:
    if make.is_ours:
        env = make.here(Plain, info_specs={"lives": Unbounded((), dtype=torch.int64)})
        assert act(env, env.reset())["info", "lives"].tolist() == [2, 2]
        return
    reader = torchrl.envs.default_info_dict_reader(["lives"], spec={"lives": Unbounded((), dtype=torch.int64)})
    env = make.here(lambda: torchrl.envs.GymWrapper(Plain()).set_info_dict_reader(reader))
    assert act(env, env.reset())["lives"].tolist() == [2, 2]


@row("The device")
def test_devices(make: Maker) -> None:
    env = make.here(cartpole)
    assert (env.device, env.reset().device) == ((torch.device("cpu"),) * 2 if make.is_ours else (None, None))


@row("Loaded state of envs")
def test_loaded_state(make: Maker) -> None:
    env = make.here(scaled)
    env.reset()
    env.load_state_dict(filled(env.state_dict(), 7.0))
    env.close()
    env.reset()
    assert ("7." in str(env.state_dict())) is make.is_ours


@row("The entry of an env in `state_dict()`")
def test_the_form_of_a_state(make: Maker) -> None:
    env = make.here(scaled)
    env.reset()
    entry = env.state_dict()["worker0"]
    assert sorted(entry["TransformedEnv"] if make.is_ours else entry) == ["loc", "scale", "standard_normal"]
    assert [*entry] == ["TransformedEnv"] or not make.is_ours


@row("`load_state_dict()`")
def test_what_loading_a_state_returns(make: Maker) -> None:
    for env, is_none in ((make.parallel(cartpole), True), (make.threaded(2, "CartPole-v1"), make.is_ours)):
        assert (env.load_state_dict(env.state_dict()) is None) is is_none


@row("`state_dict()` of an env that is closed")
def test_the_state_of_a_closed_env(make: Maker) -> None:
    env = make.here(scaled)
    env.reset()
    env.close()
    with pytest.warns(RuntimeWarning, match="that of new envs") if make.is_ours else contextlib.nullcontext():
        assert [*env.state_dict()] == ["worker0", "worker1"]


@row("`AsyncEnvPool`: `env_index`")
def test_the_index_of_asynchronous_results(make: Maker) -> None:
    pool = make.asynchronous()
    pool.async_reset_send(env_index=[0, 1])
    found = pool.async_reset_recv(min_get=2)
    assert isinstance(found.get("env_index"), torch.Tensor) is make.is_ours


@row("Envs with different bounds")
@row("Envs with different shapes")
def test_envs_that_differ(make: Maker) -> None:
    box = gymnasium.spaces.Box
    env = make.here([of(partial(Plain, box(-1, 1, (2,))), make), of(partial(Plain, box(-2, 2, (2,))), make)])
    is_lazy = type(env.observation_spec["observation"]).__name__.startswith("Stacked")
    assert is_lazy is not make.is_ours
    with make.refuses(SpecMismatch):
        make.here([of(partial(Plain, box(-1, 1, (2,))), make), of(partial(Plain, box(-1, 1, (3,))), make)]).reset()


@row("An action of another shape")
def test_actions_and_arguments_that_do_not_fit(make: Maker) -> None:
    env = make.here(cartpole)
    td = env.reset()
    with pytest.raises(KeyError, match="action"):
        env.step(td)
    with pytest.raises(TypeError, match="nope"):
        env.reset(nope=1)
    with make.refuses(match="actions have shape"):
        env.step(td.set("action", torch.zeros(2, 3, dtype=torch.int64)))


@row("Env functions that are not functions")
@pytest.mark.parametrize(("functions", "error"), [(3, TypeError), ([3, 3], TypeError), ("CartPole-v1", RuntimeError)])
def test_what_are_no_functions(make: Maker, functions: Any, error: type[Exception]) -> None:
    with pytest.raises(TypeError if make.is_ours else error) as caught:
        make.module.ParallelEnv(2, functions)
    assert isinstance(caught.value, UsageError) is make.is_ours


@row("An env in place of an env function")
def test_an_env_in_place_of_a_function(make: Maker) -> None:
    with pytest.raises(NotImplementedError, match="forward is not implemented") as caught:
        make.here(cartpole()).reset()
    assert isinstance(caught.value, EnvError) is make.is_ours


@row("Functions that return one env")
def test_functions_that_return_one_env(make: Maker) -> None:
    single = cartpole()
    with make.refuses(ValueError, "envs 0 and 1 are one object"):
        make.here(lambda: single).reset()
    env = make.here(lambda: copy.deepcopy(single))
    assert act(env, env.reset())["reward"].tolist() == [[1.0], [1.0]]


@row("Envs with text")
def test_envs_with_text(make: Maker) -> None:
    with make.refuses(EnvError, match="string of CountingEnvWithString is a NonTensor"):
        assert len(make.here(CountingEnvWithString).reset()["string"]) == 2


# ---- exceptions ------------------------------------------------------------------------------------------


@row("`step` of an env that is done")
def test_a_step_of_an_env_that_is_done(make: Maker) -> None:
    env = make.here(counted)
    td = act(env, act(env, env.reset()))
    assert td["done"].all()
    with make.refuses(match="reset them before stepping"):
        act(env, td)


@row("Another number of `create_env_kwargs`")
def test_another_number_of_arguments(make: Maker) -> None:
    with pytest.raises(RuntimeError, match="mismatch") as caught:
        make.here(counted, create_env_kwargs=[{}])
    assert isinstance(caught.value, UsageError) is make.is_ours


@row("A worker dies")
def test_a_worker_that_dies(make: Maker) -> None:
    env = make.parallel(of(partial(Fails, dies=True), make))
    first = env.reset()
    with pytest.raises(RuntimeError, match=r"Cannot proceed, worker \d dead") as caught:
        act(env, first)
    assert isinstance(caught.value, WorkerDied) is make.is_ours


@row("An env raises")
def test_an_env_that_raises(make: Maker) -> None:
    env = make.parallel(of(partial(Fails, dies=False), make))
    first = env.reset()
    with pytest.raises(
        EnvError if make.is_ours else RuntimeError, match="on purpose" if make.is_ours else r"worker \d"
    ):
        act(env, first)
    if make.is_ours:
        assert env.reset().batch_size == (2,)


@row("Wrong seeds, masks, ids and numbers of envs")
def test_wrong_arguments(make: Maker) -> None:
    env = make.here(cartpole)
    first = env.reset()
    with pytest.raises(UsageError if make.is_ours else gymnasium.error.Error):
        env.set_seed(-1)
    with make.only_ours(gymnasium.error.Error):
        env.set_seed(np.int64(3))
    with make.refuses():
        env.reset(first.set("_reset", torch.tensor([[1], [0]])))
    with pytest.raises(UsageError if make.is_ours else IndexError):
        make.here([])
    pool = make.asynchronous()
    with pytest.raises(UsageError if make.is_ours else IndexError):
        pool.async_reset_send(env_index=[7])


@row("`AsyncEnvPool`: `set_seed`, and `async_reset_send()` without envs")
def test_what_asynchronous_envs_do_for_all_envs(make: Maker) -> None:
    pool = make.asynchronous()
    with make.only_ours(NotImplementedError):
        pool.set_seed(3)
    with make.only_ours(AttributeError):
        pool.async_reset_send()
        assert len(pool.async_reset_recv(2)) == 2


@row("`step` after `close()`")
def test_a_step_after_close(make: Maker) -> None:
    env = make.here(CountingEnv)
    td = env.rand_action(env.reset())
    env.close()
    with make.refuses(match=r"is closed; reset\(\) opens it again"):
        assert env.step(td)["next"].batch_size == (2,)


@row("`close()` a second time")
def test_close_a_second_time(make: Maker) -> None:
    env = make.here(cartpole)
    env.reset()
    env.close()
    with make.only_ours(RuntimeError):
        env.close()


def test_each_row_of_the_page_has_a_program() -> None:
    row.check(Path(__file__).parent)
