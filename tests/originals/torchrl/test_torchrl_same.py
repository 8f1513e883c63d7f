"""What docs/switching/torchrl.md lists as the same: programs that give the same with TorchRL's classes and with ours."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchrl")

import torchrl.envs  # noqa: E402 - only if TorchRL is there
from torchrl.collectors import Collector, MultiSyncCollector  # noqa: E402
from torchrl.envs import Compose, GymEnv, RewardSum, StepCounter, TransformedEnv  # noqa: E402
from torchrl.envs.utils import check_env_specs  # noqa: E402

from stepmill.frontends import torchrl as frontend  # noqa: E402
from tests.originals.either import assert_same_with_either  # noqa: E402
from tests.originals.signatures import check_protected  # noqa: E402
from tests.originals.torchrl.sides import MARKS, Maker, act, cartpole, counted, use_gymnasium  # noqa: E402

pytestmark = MARKS
FLAGS = ("done", "terminated", "truncated")


def transformed() -> Any:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(StepCounter(max_steps=5), RewardSum()))


def described(data: Any) -> Any:
    """Return the keys, dtypes, shapes and values of a tensordict."""
    items = sorted(data.items(True, True), key=lambda item: str(item[0]))
    return [(key, value.dtype, tuple(value.shape), value.tolist()) for key, value in items]


def rollouts(make: Maker) -> Any:
    found = []
    for env in (make.here(transformed), TransformedEnv(make.here(cartpole), StepCounter(max_steps=5))):
        env.set_seed(0)
        torch.manual_seed(0)
        found.append(described(env.rollout(12, break_when_any_done=False)))
    return found


def collected(make: Maker) -> Any:
    """Return the data of a Collector, and what it saves."""

    def policy(data: Any) -> Any:
        return data.set("action", torch.nn.functional.one_hot(data["step_count"].squeeze(-1) % 2, 2))

    env = make.here(partial(counted, 4))
    env.set_seed(0)
    collector = Collector(env, policy, trust_policy=True, frames_per_batch=20, total_frames=40)
    found = [[part for part in described(batch) if "collector" not in str(part[0])] for batch in collector]
    state = collector.state_dict()
    other = make.here(counted, create_env_kwargs={"max_steps": 9})
    changed = Collector(
        other, policy, trust_policy=True, frames_per_batch=8, total_frames=8, create_env_kwargs={"max_steps": 3}
    )
    lengths = [batch["next", "step_count"].max().item() for batch in changed]
    return [found, sorted(state), sorted(state["env_state_dict"]), lengths]


def specs(make: Maker) -> Any:
    env = make.here(transformed)
    env.reset()
    names = ("action_spec", "observation_spec", "reward_spec", "done_spec", "full_done_spec", "full_action_spec")
    return [leaves(getattr(env, name)) for name in names]


def leaves(spec: Any) -> Any:
    """Return the text of each leaf of a spec, without the device."""
    parts = spec.items(True, True) if hasattr(spec, "items") else [("", spec)]
    return sorted((str(key), str(part).replace("device=None", "device=cpu")) for key, part in parts)


def integers(make: Maker) -> Any:
    """Step EnvPool's envs with integers, and ask for their pool."""
    import envpool

    env = make.threaded(2, "CartPole-v1", create_env_kwargs={"seed": 1})
    td = env.reset()
    found = [described(td), str(env.action_spec).replace("device=None", "device=cpu")]
    for number in range(3):
        td = env.step(td.set("action", torch.tensor([number % 2, 1])))["next"]
        found.append(described(td))
    given = envpool.make("CartPole-v1", env_type="gymnasium", num_envs=3)
    wrapped = make.module.MultiThreadedEnvWrapper(given)
    wrapped.reset()
    return [*found, wrapped._env is given, wrapped.spec is given.spec, str(wrapped.action_space), wrapped.num_workers]


def seeds(make: Maker) -> Any:
    env = make.here(cartpole)
    return [[env.set_seed(3, static_seed=is_static), described(env.reset())] for is_static in (False, True)]


def masks(make: Maker) -> Any:
    env = make.here([partial(counted, 9)] * 3)
    env.set_seed(0)
    td = env.step(env.reset().set("action", torch.tensor([[0, 1]] * 3)))["next"]
    again = env.reset(td.set("_reset", torch.tensor([[True], [False], [False]])))
    found = [described(again)]
    part = env.step(again.set("action", torch.tensor([[1, 0]] * 3)).set("_step", torch.tensor([True, False, True])))
    return [*found, part["next", "step_count"].tolist()]


def ends(make: Maker) -> Any:
    env = make.here([counted, partial(counted, 3)])
    env.set_seed(0)
    td, found = env.reset(), []
    for _ in range(6):
        stepped, td = env.step_and_maybe_reset(td.set("action", torch.tensor([[0, 1], [1, 0]])))
        found.append([described(stepped["next"]), [td[flag].tolist() for flag in FLAGS], td["step_count"].tolist()])
    return found


def parts(make: Maker) -> Any:
    """Close an env and open it again, check it, and ask its envs."""
    env = make.here(counted, create_env_kwargs=[{"max_steps": 1}, {"max_steps": 2}])
    check_env_specs(env)
    found = [env.rand_step(env.reset())["next", "done"].tolist(), list(env.libname), env.num_workers, env.batch_size]
    found += [len(env.create_env_fn), env.create_env_kwargs]
    env.close()
    found += [env.is_closed, env.reset().batch_size, env.to("cpu") is env]
    whole = make.here([partial(counted, 9)] * 3)
    whole.reset()
    view = whole[1:]
    return [*found, view.batch_size, act(view, view.reset())["step_count"].tolist()]


def classes(make: Maker) -> Any:
    pool = make.asynchronous()
    envs = {
        "ParallelEnv": make.parallel(cartpole),
        "MultiThreadedEnv": make.threaded(2, "CartPole-v1"),
        "AsyncEnvPool": pool,
    }
    found = [isinstance(env, getattr(torchrl.envs, name)) for name, env in envs.items()]
    found.append(isinstance(envs["MultiThreadedEnv"], torchrl.envs.MultiThreadedEnvWrapper))
    pool.async_reset_send(env_index=[0, 1])
    td = pool.async_reset_recv(min_get=2)
    pool.async_step_and_maybe_reset_send(td.set("action", torch.tensor([[0, 1]] * 2)))
    stepped, following = pool.async_step_and_maybe_reset_recv(min_get=2)
    return [*found, stepped["next", "reward"].tolist(), following.batch_size]


def copies(make: Maker) -> Any:
    env = make.parallel(counted, create_env_kwargs={"max_steps": 4})
    copied = pickle.loads(pickle.dumps(env))
    make.made.append(copied)
    found = [type(copied) is type(env), env.is_closed, copied.create_env_kwargs]
    for one in (env, copied):
        one.set_seed(3)
        torch.manual_seed(0)
        found.append(described(one.rollout(6, break_when_any_done=False)))
    functions = make.here(counted)
    collector = MultiSyncCollector([functions] * 2, frames_per_batch=8, total_frames=8, cat_results="stack")
    found += [(batch.shape, batch["next", "step_count"].max().item()) for batch in collector]
    return found


SAME = (rollouts, collected, specs, integers, seeds, masks, ends, parts, classes, copies)


@pytest.mark.covers("T-12", "T-17")
@pytest.mark.parametrize("program", SAME, ids=lambda program: str(program.__name__))
def test_this_program_gives_the_same_with_either(
    program: Callable[[Maker], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_gymnasium(monkeypatch)
    assert_same_with_either(program, Maker)


@pytest.mark.covers("T-17")
def test_protected_methods_that_take_no_effect_are_refused_and_named_by_the_page() -> None:
    pairs = ("ParallelEnv", "MultiThreadedEnv", "MultiThreadedEnvWrapper", "AsyncEnvPool")
    ours = (getattr(frontend, "AsyncStepmillEnv" if name == "AsyncEnvPool" else name) for name in pairs)
    check_protected("torchrl", list(zip(ours, (getattr(torchrl.envs, name) for name in pairs), strict=True)))
