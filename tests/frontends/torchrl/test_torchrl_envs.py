"""`StepmillEnv` over TorchRL's own envs: the specs and the data of TorchRL's `SerialEnv`, and what is refused."""

from __future__ import annotations

from functools import partial

import gymnasium
import pytest
import torch
from tensordict import TensorDict
from torchrl.data import Bounded, Categorical, Composite, NonTensor, Unbounded
from torchrl.envs import (
    Compose,
    DoubleToFloat,
    EnvBase,
    ExcludeTransform,
    GymEnv,
    Hash,
    NextObservationDelta,
    RenameTransform,
    SerialEnv,
    StepCounter,
    TransformedEnv,
    set_gym_backend,
)
from torchrl.envs.utils import check_env_specs

import stepmill
from stepmill.frontends.torchrl import AsyncStepmillEnv, StepmillEnv
from stepmill.pool.auto_backend import choose_backend
from stepmill.spec.options import BackendName
from tests.frontends.torchrl.makers import BACKENDS

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # TorchRL's
    pytest.mark.covers("T-12"),
]
SEEDS = (3, 14, 15)


def make_gym(seed, name="CartPole-v1"):
    set_gym_backend("gymnasium").set()
    env = GymEnv(name)
    env.set_seed(seed, static_seed=True)
    return env


def make_counted(seed):
    return TransformedEnv(make_gym(seed), StepCounter(max_steps=5))


def make_cheetah(seed):
    return TransformedEnv(make_gym(seed, "HalfCheetah-v5"), DoubleToFloat(in_keys=["observation"]))


class Nested(EnvBase):
    """Observations and actions in nested tensordicts; the episode ends at step 4."""

    def __init__(self, seed=0):
        super().__init__()
        self.observation_spec = Composite(
            seen=Composite(place=Unbounded((2,)), count=Bounded(0, 9, (), dtype=torch.int64)),
            flag=Categorical(2, (1,), dtype=torch.bool),
        )
        self.full_action_spec = Composite(action=Composite(move=Bounded(-1, 1, (2,)), mark=Categorical(3, ())))
        self.reward_spec = Unbounded((1,))

    def _values(self):
        seen = TensorDict(place=self.place.clone(), count=torch.tensor(self.count))
        return {"seen": seen, "flag": torch.tensor([self.count % 2 == 0])}

    def _reset(self, tensordict=None):
        self.place, self.count = torch.zeros(2), 0
        return TensorDict(self._values())

    def _step(self, tensordict):
        self.place = self.place + tensordict["action", "move"] * (1 + tensordict["action", "mark"])
        self.count += 1
        ended = torch.tensor([self.count == 4])
        return TensorDict(
            {**self._values(), "reward": self.place.sum(0, keepdim=True), "done": ended, "terminated": ended.clone()}
        )

    def _set_seed(self, seed):
        pass


@pytest.fixture(params=BACKENDS)
def both(request, made):
    """A function that makes TorchRL's env of some env functions, and ours."""

    def make(maker):
        fns = [partial(maker, seed) for seed in SEEDS]
        theirs = SerialEnv(len(fns), fns, shared_memory=False)
        return made(theirs), made(StepmillEnv(fns, **BACKENDS[request.param]))

    return make


@pytest.mark.parametrize("maker", [make_gym, make_counted, make_cheetah, Nested])
def test_specs_and_rollouts_are_those_of_torchrl(both, maker):
    theirs, ours = both(maker)
    assert ours.full_action_spec == theirs.full_action_spec
    assert ours.observation_spec == theirs.observation_spec
    assert ours.reward_spec == theirs.reward_spec
    one = theirs.rollout(30, break_when_any_done=False)
    steps = iter(one.unbind(1))
    other = ours.rollout(30, lambda td: td.set("action", next(steps)["action"]), break_when_any_done=False)
    assert one["next", "done"].any() or maker is make_cheetah
    for key in one.keys(True, True):
        assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("where", BACKENDS)
def test_torchrls_own_checker_passes(made, where):
    env = made(StepmillEnv([partial(make_counted, seed) for seed in SEEDS], **BACKENDS[where]))
    check_env_specs(env, break_when_any_done="both", seed=3)


def test_a_seed_is_given_to_the_env_before_its_reset(made):
    ours = made(StepmillEnv([partial(make_gym, 0)] * 2, backend="serial"))
    ours.set_seed([5, 6])
    td = ours.reset()
    for row, seed in enumerate((5, 6)):
        assert torch.equal(td["observation"][row], make_gym(seed).reset()["observation"])


def test_attributes_of_the_env_and_of_what_it_wraps_are_reached(made):
    ours = made(StepmillEnv([partial(make_counted, seed) for seed in SEEDS], backend="serial"))
    assert list(ours.env_name) == ["CartPole-v1"] * 3
    assert [space.n for space in ours.action_space] == [2] * 3


def test_asynchronous_steps_count_the_steps_of_each_env(made):
    env = made(AsyncStepmillEnv([partial(make_counted, seed) for seed in SEEDS], backend="thread", num_workers=2))
    env.async_reset_send(env_index=[0, 1, 2])
    td = env.async_reset_recv(min_get=3)
    for step in range(1, 4):
        td["action"] = torch.nn.functional.one_hot(torch.ones(3, dtype=torch.int64), 2)
        env.async_step_and_maybe_reset_send(td)
        stepped, td = env.async_step_and_maybe_reset_recv(min_get=3)
        assert stepped["next", "step_count"].flatten().tolist() == [step] * 3


def test_a_pool_runs_them_too():
    with stepmill.Pool([partial(make_counted, 0)] * 2, backend="serial") as pool:
        batch = pool.reset()
        assert batch.obs["step_count"].tolist() == [[0], [0]]
        assert pool.spec.action.shape == (2,)


class WithInput(Nested):
    def __init__(self, seed=0):
        super().__init__()
        self.state_spec = Composite(gravity=Unbounded((1,)))


class Ragged(Nested):
    def __init__(self, seed=0):
        super().__init__()
        self.observation_spec["seen", "place"] = Unbounded((-1,))


class WithText(Nested):
    def __init__(self, seed=0):
        super().__init__()
        self.observation_spec["note"] = NonTensor((), example_data="text")

    def _values(self):
        return {**super()._values(), "note": "text"}


def make_hashed(seed):
    return TransformedEnv(WithText(), Compose(Hash(["note"], ["hash"]), ExcludeTransform("note")))


def make_delta(seed):
    return TransformedEnv(make_gym(seed), NextObservationDelta())


def make_renamed(seed):
    return TransformedEnv(make_gym(seed), RenameTransform(["reward"], ["points"], create_copy=False))


@pytest.mark.parametrize(
    ("maker", "words"),
    [
        (lambda seed: SerialEnv(2, Nested), "has batch_size=\\(2,\\).*return a single env"),
        (WithInput, "has the inputs 'gravity' beside the action"),
        (Ragged, "observation.seen.place of shape \\(-1,\\)"),
        (WithText, "observation.note of WithText is a NonTensor.*ExcludeTransform"),
        (make_delta, "NextObservationDelta cannot live inside"),
        (make_renamed, "has the reward keys 'points'.*RenameTransform"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(maker, words):
    with pytest.raises(stepmill.EnvError, match=words):
        StepmillEnv([partial(maker, 0)], backend="serial")


def test_text_that_a_transform_reads_may_be_excluded_after_it(made):
    env = made(StepmillEnv([partial(make_hashed, 0)] * 2, backend="serial"))
    seen = env.rollout(2)
    assert seen["hash"].shape[:2] == (2, 2)
    assert "note" not in seen.keys()  # noqa: SIM118


def test_a_transform_that_works_only_outside_raises_torchrls_class():
    with pytest.raises(RuntimeError, match="Place the transform OUTSIDE"):
        StepmillEnv([partial(make_delta, 0)], backend="serial")


@pytest.mark.parametrize("maker", [partial(gymnasium.make, "CartPole-v1"), partial(make_gym, 0)])
def test_rewards_have_torchs_default_dtype(maker):
    torch.set_default_dtype(torch.float64)
    try:
        env = StepmillEnv([maker] * 2, backend="serial")
        assert env.reward_spec.dtype is env.rollout(2)["next", "reward"].dtype is torch.float64
        env.close()
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("name", "key"), [("step", ("next", "reward")), ("_step", "reward"), ("_step_proc_data", "reward")]
)
def test_methods_of_a_subclass_of_gym_env_are_called(made, name, key):
    def add_to_reward(self, tensordict):
        after = getattr(super(cls, self), name)(tensordict)
        after[key] += 100
        return after

    cls = type("Louder", (GymEnv,), {name: add_to_reward})
    env = made(StepmillEnv([partial(cls, "CartPole-v1")] * 2, backend="serial"))
    env.set_seed(0)
    assert env.rollout(3)["next", "reward"].flatten().tolist() == [101.0] * 6


def test_few_gym_envs_of_tiny_envs_run_in_line():
    for make in (partial(GymEnv, "CartPole-v1"), lambda: GymEnv("CartPole-v1")):
        assert choose_backend([make] * 8, stepmill.PoolOptions()) is BackendName.SERIAL
    rendered = partial(GymEnv, "CartPole-v1", from_pixels=True)
    for make in (rendered, lambda: GymEnv("CartPole-v1", from_pixels=True), partial(GymEnv, "HalfCheetah-v5")):
        assert choose_backend([make] * 8, stepmill.PoolOptions()) is BackendName.PROCESS
