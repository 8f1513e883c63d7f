"""Programs at corners that no list had, with ALF's classes and with ours; test_alf_differences names the rows of the page."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from stepmill.frontends.alf import BatchEnvironmentWrapper
from tests.originals.alf.sides import MARKS, Maker, actions, class_of, plain
from tests.originals.either import assert_same_with_either
from tests.originals.rows import OURS

pytestmark = MARKS
Make = Callable[..., Any]
WRONG = (RuntimeError, ValueError)


def part(name: str) -> Any:
    """Return a module of ALF, or torch."""
    return importlib.import_module(name if name == "torch" else f"alf.{name}" if name else "alf")


def tensor(values: Any, dtype: str = "float32") -> Any:
    return part("torch").tensor(values, dtype=getattr(part("torch"), dtype))


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or that it was refused."""
    try:
        return plain(call())
    except WRONG:
        return "refused"


class Parts:
    """The methods of an env whose specs and parts of a TimeStep are arguments. Its numbers tell the env's id and its step."""

    def __init__(self, env_id: int | None = None, **own: Any) -> None:
        super().__init__()
        alf = part("")
        self.made_with, self.t, self.is_over = env_id or 0, 0, True
        self.length = own.pop("length", 3)
        self.specs = {"observation": alf.TensorSpec((2,)), "reward": alf.TensorSpec(()), "info": {}}
        self.specs["action"] = alf.BoundedTensorSpec((), minimum=-9.0, maximum=9.0)
        self.specs.update({name: own.pop(name) for name in list(own) if name in self.specs})
        self.gives = own  # a function of the env, by what it gives

    def observation_spec(self) -> Any:
        return self.specs["observation"]

    def action_spec(self) -> Any:
        return self.specs["action"]

    def reward_spec(self) -> Any:
        return self.specs["reward"]

    def env_info_spec(self) -> Any:
        return self.specs["info"]

    def seed(self, seed: Any) -> Any:
        return "seeded", seed

    def _reset(self) -> Any:
        self.t, self.is_over = 0, False
        return self._tell(0, filled(self.specs["action"], 0))

    def _step(self, action: Any) -> Any:
        if self.is_over:
            return self.reset()  # type: ignore[attr-defined]
        self.t += 1
        kind = self._give("kind", lambda: 2 if self.t >= self.length else 1)
        self.is_over = kind == 2
        return self._tell(kind, action)

    def _give(self, name: str, default: Callable[[], Any]) -> Any:
        return self.gives[f"give_{name}"](self) if f"give_{name}" in self.gives else default()

    def _tell(self, kind: int, action: Any) -> Any:
        number = 10 * self.made_with + self.t
        return part("data_structures").TimeStep(
            step_type=np.int32(kind),
            reward=self._give("reward", lambda: filled(self.specs["reward"], self.t)),
            discount=np.float32(kind != 2),
            observation=self._give("observation", lambda: filled(self.specs["observation"], number)),
            prev_action=action,
            env_id=np.int32(self.made_with),
            env_info=self._give("info", lambda: filled(self.specs["info"], self.t)),
        )


def filled(specs: Any, number: int) -> Any:
    """Return arrays of a number, and scalars where a spec has no shape."""

    def fill(spec: Any) -> Any:
        dtype = np.dtype(str(spec.dtype).rpartition(".")[2])
        return np.full(spec.shape, number, dtype) if spec.shape else dtype.type(number)

    return part("nest").map_structure(fill, specs)


@functools.cache
def parts_class() -> Any:
    base = importlib.import_module("alf.environments.alf_environment").AlfEnvironment
    return type("PartsEnv", (Parts, base), {"__module__": __name__})


def construct(env_id: int | None = None, **own: Any) -> Any:
    return parts_class()(env_id, **own)


def envs(num: int, **own: Any) -> list[Any]:
    """Return constructors of envs."""
    return [partial(construct, **own)] * num


def play(env: Any, *steps: Any) -> list[Any]:
    """Reset an env, and step it."""
    return [plain(env.reset()), *(plain(env.step(action)) for action in steps)]


# ---- programs that give the same -----------------------------------------------------------------------------------------


def nests(make: Make) -> Any:
    """Leaves of every dtype in nests of each kind, and actions of several parts."""
    alf, torch = part(""), part("torch")
    step = part("data_structures").AlgStep
    observation = {
        "z": alf.TensorSpec((2, 3), torch.uint8),
        "a": [alf.TensorSpec((), torch.bool), (alf.TensorSpec((1,), torch.int8),)],
        "d": alf.TensorSpec((), torch.float64),
        "h": alf.TensorSpec((2,), torch.float16),
        "empty": ({}, ()),
        "s": step(output=alf.TensorSpec((2,), torch.int16), state=(), info=alf.TensorSpec((), torch.int64)),
    }
    number = partial(alf.BoundedTensorSpec, minimum=0, maximum=3)
    action = {"move": number((2,)), "button": (number((), torch.int64), number((2,), torch.int32))}
    env = make(envs(2, observation=observation, action=action))
    move = tensor([[0.1, 0.2], [0.3, 0.4]])
    button = (tensor([1, 2], "int64"), tensor([[1, 2], [3, 0]], "int32"))
    found = play(env, {"button": button, "move": move}, {"move": move, "button": button})
    return [*found, str(env.observation_spec()), str(env.action_spec()), outcome(lambda: env.step({"move": move}))]


def actions_of_odd_values_and_forms(make: Make) -> Any:
    alf, torch = part(""), part("torch")
    env = make(envs(2, length=99))
    odd = ([float("nan"), float("inf")], [100.0, -100.0])  # out of bounds
    strided = (torch.arange(4.0)[::2], torch.tensor(3.0).expand(2))
    found = [str(play(env, *map(tensor, odd))), play(env, *strided)]
    wrong = (torch.zeros(3), torch.zeros(1), torch.zeros(2, 1), torch.zeros(()))
    found += [outcome(partial(env.step, each)) for each in wrong]
    found.append(plain(env.step(actions(1, 2))))  # a refused action has changed nothing
    env = make(envs(2, action=alf.BoundedTensorSpec((2, 2), minimum=-9.0, maximum=9.0)))
    cube = torch.arange(8.0).reshape(2, 2, 2)
    found.append(play(env, cube.transpose(1, 2), cube.permute(2, 1, 0), cube[:, :1].expand(2, 2, 2)))
    env = make(envs(2, action=alf.BoundedTensorSpec((), torch.int64, minimum=0, maximum=3)))
    with torch.no_grad():
        found.append(play(env, tensor([7, -1], "int64")))
    return found


def time_steps_that_are_kept(make: Make) -> Any:
    env = make(envs(2, length=99, observation=part("").TensorSpec((3000,))))
    steps = [env.reset(), *(env.step(actions(number, number)) for number in range(30))]
    found: list[Any] = [[float(step.observation.sum()) for step in steps]]
    steps[-1].observation.add_(1000)  # the learner may write to its tensors
    found += [float(env.current_time_step().observation[0, 0]), float(env.step(actions(1, 1)).observation[0, 0])]
    copies = (copy.deepcopy(steps[3]), pickle.loads(pickle.dumps(steps[3])), steps[3].cpu())
    found += [(type(each).__name__, float(each.observation.sum())) for each in copies]
    observation = steps[3].observation.requires_grad_()
    (observation * 2).sum().backward()
    found += [float(observation.grad.sum()), steps[2].cpu() is steps[2].cpu(), steps[2]._replace(reward=1).reward]
    return [*found, [plain(is_one()) for is_one in (steps[0].is_first, steps[0].is_mid, steps[0].is_last)]]


def rewards_of_several_numbers(make: Make) -> Any:
    env = make(envs(3, reward=part("").TensorSpec((3,)), length=2))
    specs = [str(env.reward_spec()), str(env.time_step_spec())]
    return [*play(env, *[actions(1, 2, 3)] * 4), *specs]


def wrapped_envs(make: Make) -> Any:
    """ALF's wrappers in the processes."""
    alf, wrappers = part(""), part("environments.alf_wrappers")
    wide = alf.BoundedTensorSpec((2,), minimum=-2.0, maximum=6.0)

    def limited(env_id: int) -> Any:
        one = wrappers.NonEpisodicAgent(wrappers.TimeLimit(construct(env_id, length=9), 3), 0.5)
        return wrappers.ActionObservationWrapper(one)

    def discrete(env_id: int) -> Any:
        return wrappers.DiscreteActionWrapper(construct(env_id, action=wide), 3)

    def normalized(env_id: int) -> Any:
        return wrappers.NormalizedActionWrapper(construct(env_id, action=wide))

    two = tensor([[0.0, 1.0], [-1.0, 0.5]])
    pairs = ((limited, actions(1, 2)), (discrete, tensor([4, 8], "int64")), (normalized, two))
    found = []
    for constructor, action in pairs:
        env = make([constructor] * 2)
        found += [play(env, *[action] * 5), str(env.action_spec()), str(env.observation_spec())]
    return found


def tasks(make: Make) -> Any:
    wrapper = part("environments.alf_wrappers").MultitaskWrapper

    def construct_both(env_id: int) -> Any:
        return wrapper([construct(env_id, length=length) for length in (2, 3)], ["left", "right"], env_id=env_id)

    env = make([construct_both] * 2)
    action = {"task_id": tensor([0, 1], "int64"), "action": actions(1, 2)}
    return [*play(env, *[action] * 5), env.num_tasks, env.task_names, str(env.action_spec())]


def wrappers_of_the_whole_env(make: Make) -> Any:
    wrappers = part("environments.alf_wrappers")
    env = make(envs(2))

    class Ones(wrappers.AlfEnvironmentBaseWrapper):  # type: ignore[misc, name-defined]
        def _step(self, action: Any) -> Any:
            return self._env.step(action)._replace(reward=actions(1, 1))

    whole = Ones(env)
    found = play(whole, actions(1, 2), actions(3, 4))
    found += [whole.batch_size, whole.batched, whole.is_tensor_based, whole.num_tasks, whole.task_names]
    found += [plain(whole.current_time_step()), whole.sync_progress(), len(whole.envs), whole.wrapped_env() is env]
    with pytest.raises(NotImplementedError):
        whole.get_info()
    scalar = wrappers.ScalarRewardWrapper(make(envs(2, reward=part("").TensorSpec((2,)))), [1.0, 3.0])
    return [*found, *play(scalar, actions(1, 2))]


def episodes_of_every_form(make: Make) -> Any:
    """An env that resets itself, one whose every step is the last, and one that never ends; more resets than steps."""
    found = []
    for kind in (lambda env: int(env.t != 2), lambda env: 2, lambda env: 1 + (env.t >= 2), lambda env: 1):
        env = make(envs(2, give_kind=kind))
        found += [play(env, *[actions(1, 2)] * 6), play(env), play(env, actions(1, 1))]
    return found


def many_spares(make: Make) -> Any:
    env = make(envs(5, length=2), num_spare_envs_for_reload=3)
    found = play(env, *(actions(number, number) for number in range(9)))
    return [*found, outcome(lambda: env.seed([1])), env.seed(range(5)), env.batch_size, len(env.envs)]


def lives(make: Make) -> Any:
    """The env as a context, two closes, what is known after them, and another env that is used from a thread."""
    with make(envs(2)) as env:
        found = play(env)
    env.close()
    found += [env.batch_size, env.num_tasks, str(env.action_spec()), len(env.envs)]
    with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(env)
    one, two = make(envs(2)), make(envs(3))
    found += [*play(one), *play(two)]
    thread = threading.Thread(target=lambda: found.append(plain(one.step(actions(1, 2)))))
    thread.start()
    thread.join()
    return [*found, plain(two.step(actions(1, 2, 3))), hasattr(two, "nothing"), hasattr(two, "__len__")]


def methods_of_a_subclass(make: Make) -> Any:
    class Own(class_of(make.whose)):  # type: ignore[attr-defined, misc]
        def __init__(self, num: int) -> None:
            super().__init__(envs(num), False)
            self.extra = 1

        def step(self, action: Any) -> Any:
            return super().step(action * 2)

        def seed(self, seed: int) -> Any:
            return super().seed([seed + place for place in range(self.batch_size)])

        def sync_progress(self) -> None:
            self.extra += 1

        def close(self) -> None:
            self.extra += 1
            super().close()

    env = Own(2)
    found = [*play(env, actions(1, 2)), env.seed(3), env.sync_progress(), env.extra, env.close(), env.extra]
    handle = make(envs(2)).envs[0]
    handle.note = 5  # of the object here, not of the env
    return [*found, handle.note, plain(handle.call("_step", np.float32(1))()), plain(handle.call("reset")())]


def progress_and_device_in_infos(make: Make) -> Any:
    schedulers = part("utils.schedulers")
    schedulers.update_progress("iterations", 5)

    def read(env: Any) -> Any:
        is_cpu = part("").get_default_device() == "cpu"
        return {"p": np.float32(schedulers.get_progress("iterations")), "cpu": np.float32(is_cpu)}

    env = make(envs(2, info={name: part("").TensorSpec(()) for name in ("p", "cpu")}, give_info=read))
    found = play(env)
    schedulers.update_progress("iterations", 9)
    env.sync_progress()
    return [*found, plain(env.step(actions(1, 2))), str(env.env_info_spec()), str(env.time_step_spec())]


def random_envs(make: Make) -> Any:
    """ALF's random env, whose episodes end at random, with actions that its spec samples."""
    alf, torch = part(""), part("torch")
    random = part("environments.random_alf_environment").RandomAlfEnvironment
    spec = alf.BoundedTensorSpec((), torch.int64, minimum=0, maximum=2)
    env = make([partial(random, alf.TensorSpec((3,)), spec, episode_end_probability=0.3)] * 3)
    env.seed([1, 2, 3])
    torch.manual_seed(3)
    return [*play(env, *(env.action_spec().sample((3,)) for _ in range(12))), env.action_spec() == spec]


PROGRAMS: list[Callable[[Make], Any]] = [nests, actions_of_odd_values_and_forms, time_steps_that_are_kept, tasks]
PROGRAMS += [rewards_of_several_numbers, wrapped_envs, wrappers_of_the_whole_env, episodes_of_every_form, many_spares]
PROGRAMS += [lives, methods_of_a_subclass, progress_and_device_in_infos, random_envs]


@pytest.mark.covers("A-27/time_step")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("program", PROGRAMS)
def test_this_program_gives_the_same_with_either(program: Callable[[Any], Any]) -> None:
    assert_same_with_either(program, Maker)


# ---- what the page lists as different ------------------------------------------------------------------------------------


@pytest.fixture
def make(whose: str) -> Any:
    """Make parallel environments, which are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda constructors: stack.enter_context(contextlib.closing(class_of(whose)(constructors)))


def test_time_steps_of_another_form_than_the_specs(make: Any, whose: str) -> None:
    info = {"k": part("").TensorSpec(())}
    for own, is_kept in (
        ({"give_reward": lambda env: 1.5}, False),
        ({"give_observation": lambda env: [1.0, 2.0]}, False),
        ({"give_observation": lambda env: np.zeros(2)}, False),
        ({"give_observation": lambda env: part("torch").zeros(2)}, False),
        ({"give_observation": lambda env: np.zeros(4, np.float32)[::2]}, False),
        ({"info": info, "give_info": lambda env: {"k": 3.0}}, False),
        ({"give_info": lambda env: {"extra": np.float32(1)}}, False),
        ({"give_observation": lambda env: np.zeros(3, np.float32)}, True),  # only the first values are copied
    ):
        found = outcome(make(envs(1, **own)).reset)
        assert (found == "refused") is (is_kept if whose == OURS else not is_kept), own
    found = make(envs(1, give_reward=lambda env: np.float64(1.5))).reset().reward.tolist()
    assert (found == [1.5]) is (whose == OURS)


def test_dicts_of_time_steps(make: Any, whose: str) -> None:
    spec = OrderedDict(b=part("").TensorSpec(()), a=part("").TensorSpec(()))
    observation = make(envs(1, observation=spec)).reset().observation
    assert type(observation) is (dict if whose == OURS else OrderedDict)
    assert list(observation) == (["b", "a"] if whose == OURS else ["a", "b"])
    part("nest").assert_same_structure(observation, spec)


def test_constructors_from_an_iterator(make: Any, whose: str) -> None:
    with contextlib.nullcontext() if whose == OURS else pytest.raises(TypeError):
        assert make(iter(envs(2))).batch_size == 2


def test_numbers_as_actions_of_one_env_and_its_methods_as_attributes(make: Any, whose: str) -> None:
    env = make(envs(2))
    env.reset()
    action = env.envs[0].step(1.0).prev_action
    assert (action, type(action)) == (1.0, np.float32 if whose == OURS else float)
    with contextlib.nullcontext() if whose == OURS else pytest.raises(EOFError):
        assert callable(env.envs[0].seed)


def test_env_ids_of_one_batched_env(make: Any, whose: str) -> None:
    def construct_two(env_id: int) -> Any:
        return BatchEnvironmentWrapper([construct(7) for _ in range(2)])

    env = make([construct_two])
    assert env.reset().env_id.tolist() == [0, 1]
    found = env.envs[0].step(np.ones(2, np.float32)).env_id.tolist()
    assert found == ([0, 1] if whose == OURS else [7, 7])
