"""Workers know the envs that a program has registered with Gymnasium, and the program's warnings filters."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from gymnasium.envs.registration import registry

import stepmill
from stepmill.testing.faulty import DyingEnv
from tests.harness.scripts import run_file, run_source

with contextlib.suppress(ImportError):
    import ale_py  # noqa: F401  # registers its envs
NEEDS_ATARI = pytest.mark.skipif("ALE/Pong-v5" not in registry, reason="needs ale_py")
CONTEXTS = pytest.mark.parametrize("context", [pytest.param("fork", marks=pytest.mark.slow), "forkserver", "spawn"])
FRESH = pytest.mark.parametrize("context", ["forkserver", "spawn"])


@pytest.fixture(autouse=True)
def _registry_as_before() -> Iterator[None]:
    before = dict(registry)
    yield
    registry.clear()
    registry.update(before)


def _pool(context: str, env_id: str, *, num_envs: int = 2, **options: Any) -> stepmill.Pool:
    return stepmill.Pool(
        [partial(gymnasium.make, env_id)] * num_envs,
        backend="process",
        num_workers=min(2, num_envs),
        options=stepmill.PoolOptions(context=context, **options),
    )


def _time_limits(pool: stepmill.Pool) -> list[int]:
    return [spec.max_episode_steps for spec in pool.get_attr("spec")]


@CONTEXTS
@pytest.mark.parametrize(
    "entry_point",
    ["gymnasium.envs.classic_control:CartPoleEnv", CartPoleEnv, lambda **kwargs: CartPoleEnv(**kwargs)],
    ids=["text", "class", "lambda"],
)
def test_workers_make_what_the_program_has_registered(context, entry_point):
    gymnasium.register("Mine-v0", entry_point=entry_point, max_episode_steps=7)
    with _pool(context, "Mine-v0") as pool:
        assert _time_limits(pool) == [7, 7]


@FRESH
def test_workers_make_what_the_program_has_registered_in_place_of_gymnasiums_own(context):
    registry["CartPole-v1"] = gymnasium.envs.registration.EnvSpec(
        "CartPole-v1", entry_point="gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=7
    )
    with _pool(context, "CartPole-v1") as pool:
        assert _time_limits(pool) == [7, 7]


@NEEDS_ATARI
@FRESH
def test_a_registration_that_replaces_a_packages_own_holds_for_every_env(context):
    pong = registry["ALE/Pong-v5"]
    registry["ALE/Pong-v5"] = gymnasium.envs.registration.EnvSpec(
        "ALE/Pong-v5", entry_point=pong.entry_point, kwargs=pong.kwargs, max_episode_steps=7
    )
    with _pool(context, "ALE/Pong-v5", num_envs=4) as pool:  # the first env of a worker imports ale_py, which registers
        assert _time_limits(pool) == [7] * 4


@FRESH
def test_a_restarted_worker_knows_them_too(context):
    gymnasium.register("Dying-v0", entry_point=_dying)
    with _pool(context, "Dying-v0", num_envs=1, on_fault="truncate") as pool:
        pool.reset(seed=0)
        results = [pool.step([1]) for _ in range(3)]
        assert [bool(result.truncated[0]) for result in results] == [False, True, False]


def _dying(**kwargs: Any) -> gymnasium.Env[Any, Any]:
    return DyingEnv(at=2)


@FRESH
def test_an_env_whose_registration_cannot_be_sent_is_named_where_it_is_made(context):
    lock = threading.Lock()
    gymnasium.register("Locked-v0", entry_point=lambda **kwargs: CartPoleEnv(), kwargs={"lock": lock})
    with _pool(context, "CartPole-v1") as pool:
        assert _time_limits(pool) == [500, 500]
    with pytest.raises(stepmill.EnvError, match=r"Locked-v0.*cannot be sent.*lock.*context='fork'"):
        _pool(context, "Locked-v0")


@CONTEXTS
def test_a_script_registers_its_own_envs(tmp_path, context):
    path = tmp_path / "train.py"
    path.write_text(f"""
import gymnasium as gym
import stepmill
from gymnasium.envs.classic_control import CartPoleEnv

class Mine(CartPoleEnv):
    pass

gym.register("script/Mine-v0", entry_point=Mine)
gym.register("script/Text-v0", entry_point="__main__:Mine")
for name in ("script/Mine-v0", "script/Text-v0"):
    options = stepmill.PoolOptions(backend="process", num_workers=1, context={context!r})
    envs = stepmill.VectorEnv([lambda: gym.make(name)] * 2, options=options)
    assert envs.reset(seed=0)[0].shape == (2, 4)
    envs.close()
stepmill.make_vec("script/Text-v0", 2, options=options).close()
print("done")
""")
    result = run_file(path)
    assert (result.stdout, result.stderr) == ("done\n", "")


@pytest.mark.slow
@NEEDS_ATARI
@FRESH
@pytest.mark.parametrize("make", ["VectorEnv([lambda: gym.make('ALE/Pong-v5')] * 2, num_workers=1, options=options)",
                                  "Pool([lambda: gym.make('ALE/Pong-v5')] * 2, num_workers=1, options=options)",
                                  "make_vec('ALE/Pong-v5', 2, num_workers=1, options=options)"])  # fmt: skip
def test_envs_of_a_registered_package_are_made_in_silence(context, make):
    result = run_source(f"""
        import ale_py, gymnasium as gym, stepmill
        gym.register_envs(ale_py)
        options = stepmill.PoolOptions(backend="process", context={context!r})
        envs = stepmill.{make}
        envs.reset(seed=0)
        envs.close()
        print("done")
    """)
    noise = [line for line in result.stderr.splitlines() if "A.L.E" not in line and "Stella" not in line]
    assert (result.stdout, noise) == ("done\n", [])


@FRESH
def test_a_program_without_gymnasium_has_workers_without_it(context):
    result = run_source(f"""
        import sys, stepmill
        from stepmill.envs.opaque import OpaqueEnvMaker
        class OldEnv:
            def reset(self): return 0
            def step(self, action): return 0, 0.0, False, {{}}
        options = stepmill.PoolOptions(backend="process", context={context!r})
        assert "gymnasium" not in sys.modules
        with stepmill.Pool([OpaqueEnvMaker(OldEnv)] * 2, num_workers=1, options=options) as pool:
            assert pool.call(lambda env: "gymnasium" in sys.modules) == (False, False)
        print("done")
    """)
    assert (result.stdout, result.stderr) == ("done\n", "")


def _warn() -> Any:
    warnings.warn("an env is old", DeprecationWarning, stacklevel=2)
    return CartPoleEnv()


@CONTEXTS
def test_a_warning_that_the_program_makes_an_error_is_one_in_workers(context):
    options = stepmill.PoolOptions(backend="process", context=context)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "an env is .ld", DeprecationWarning)
        with pytest.raises(stepmill.EnvError, match="an env is old"):
            stepmill.Pool([_warn], options=options)
        warnings.filterwarnings("ignore", "an env is .ld", DeprecationWarning)
        stepmill.Pool([_warn], options=options).close()
