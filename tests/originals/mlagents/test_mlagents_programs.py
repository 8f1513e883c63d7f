"""Programs at corners that no list had, with ML-Agents' classes and with ours; test_mlagents_differences names the rows."""

from __future__ import annotations

import contextlib
import copy
import pickle
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlagents")

from mlagents.trainers.action_info import ActionInfo
from mlagents.trainers.agent_processor import AgentManager as TrainersAgentManager
from mlagents.trainers.agent_processor import AgentManagerQueue
from mlagents.trainers.settings import ConstantSettings
from mlagents.trainers.stats import StatsReporter
from mlagents.trainers.torch_entities.action_log_probs import LogProbsTuple
from mlagents_envs import exception, side_channel
from mlagents_envs.base_env import ActionTuple, DecisionSteps, TerminalSteps
from mlagents_envs.side_channel.environment_parameters_channel import EnvironmentParametersChannel

from tests.frontends.mlagents.parts import AgentManager, Policy, decide, raise_
from tests.originals.either import assert_same_with_either
from tests.originals.mlagents.real_env import Real, decisions, ends, pair, real, spec
from tests.originals.mlagents.sides import MARKS, Maker, class_of, run_options, started, step_until
from tests.originals.mlagents.test_mlagents_same import plain
from tests.originals.rows import OURS

pytestmark = MARKS
PURPOSE = "on purpose"


def outcome(call: Callable[[], Any]) -> Any:
    """Return what a call returns, or the class and the text of the exception that it raises."""
    try:
        return plain(call())
    except Exception as exc:
        return type(exc).__name__, str(exc)


class Calls:
    """A policy of one function."""

    def __init__(self, function: Callable[[Any, int], Any]) -> None:
        self.get_action = function


def observations(make: Maker) -> Any:
    """Three observations of other dtypes, masks, groups and ids of any size; sometimes no agents."""

    def results(env: Any, name: str) -> Any:
        ids = [2**31 - 1, 5, 0][: 3 - env.t % 4] if env.t % 4 < 3 else []
        num = len(ids)
        obs = [np.arange(num * 12, dtype=np.float32).reshape(num, 2, 2, 3)]
        obs += [np.arange(num * 4, dtype=np.float64).reshape(num, 4), np.full((num, 1), env.t, np.uint8)]
        masks = [np.zeros((num, 3), np.bool_), np.ones((num, 2), np.bool_)]
        groups = np.arange(num, dtype=np.int32)
        decided = DecisionSteps(
            obs, np.ones(num, np.float32), np.array(ids, np.int32), masks, groups, np.ones(num, np.float32)
        )
        is_end = int(env.t == 2)
        ended = [np.zeros((is_end, *shape), np.float32) for shape in ((2, 2, 3), (4,), (1,))]
        return decided, ends([7] * is_end, ended)

    manager, _ = started(make, real({"walk": spec(((2, 2, 3), (4,), (1,)), 0, (3, 2))}, results))
    found = []
    for _ in range(6):
        steps = manager.get_steps()
        agents = steps[0].current_all_step_result["walk"][0]
        found += [plain(steps), manager.process_steps(steps), len(agents), list(agents), agents.agent_id_to_index]
        found += [type(agents).__name__, type(agents.obs), type(agents.action_mask), agents.obs[0].flags.c_contiguous]
    return found


def behaviors_that_come_and_go(make: Maker) -> Any:
    names: Any = (["a"], ["a", "b"], ["b"], [], ["c"])
    manager, agents = started(
        make, real(lambda time: {name: spec() for name in names[min(time, 4)]}), names=("a", "b", "d")
    )
    found = [list(manager.training_behaviors)]
    for _ in range(6):
        steps = manager.get_steps()
        found += [plain(steps), manager.process_steps(steps)]
    return [*found, manager.policies["a"].asked, manager.policies["b"].asked, len(agents["d"].experiences)]


def policies(make: Maker) -> Any:
    ones = ActionTuple(continuous=np.ones((2, 2), np.float32))
    wide = ActionTuple(continuous=np.ones((2, 2), np.float64), discrete=np.ones((2, 1), np.int64))
    manager, _ = started(make, real())
    found = []
    for info in (
        ActionInfo.empty(),
        ActionInfo(ones, ones, {}, []),
        ActionInfo(ones, ones, {"x": np.arange(3)}, [1, 2, 9]),
        ActionInfo(ones, wide, {}, np.array([1, 2])),
    ):
        manager.set_policy("walk", Calls(lambda steps, worker_id, info=info: info))
        found += [outcome(manager.get_steps), outcome(manager.get_steps)]
    asked: list[int] = []

    def fail_once(steps: Any, worker_id: int) -> Any:
        asked.append(worker_id)
        if len(asked) == 2:
            raise LookupError(PURPOSE)
        return decide(steps, 3.0)

    manager.set_policy("walk", Calls(fail_once))
    return [*found, *(outcome(manager.get_steps) for _ in range(3)), asked]


def actions_of_two_behaviors(make: Maker) -> Any:
    """The observations tell how many actions the env has had."""

    def results(env: Any, name: str) -> Any:
        return decisions([1, 2], [np.full((2, 3), len(env.got), np.float32)]), ends([])

    manager, _ = started(make, real({"a": spec(), "b": spec()}, results), names=("a",))
    found = [plain(manager.get_steps())]
    manager.set_policy("b", Policy(2.0))
    found += [plain(manager.get_steps()) for _ in range(2)]
    del manager.policies["a"]
    return [*found, plain(manager.get_steps())]


class Refuses(AgentManager):
    """Raises an exception for each experience."""

    def add_experiences(self, *experience: Any) -> None:
        super().add_experiences(*experience)
        raise LookupError(PURPOSE)


def agent_managers(make: Maker) -> Any:
    manager, agents = started(make, real())
    walk = agents["walk"]
    found = [manager.process_steps([]), len(manager.first_step_infos)]
    steps = manager.get_steps()
    found += [len(manager.first_step_infos), len(walk.experiences), manager.process_steps(steps)]
    found += [manager.process_steps(steps), len(walk.experiences), manager.reset({}), manager.reset({}), walk.num_ended]
    late, refuses = AgentManager(), Refuses()
    for each in (late, refuses):
        each.policy_queue = AgentManagerQueue("walk")
    manager.set_agent_manager("walk", late)
    steps = manager.get_steps()
    manager.set_policy("walk", Policy(4.0))
    found += [len(late.experiences), len(walk.experiences), late.policy.number]
    manager.set_agent_manager("walk", refuses)
    found += [outcome(partial(manager.process_steps, steps)), len(outcome(manager.get_steps)), manager.reset({})]
    # The first steps are offered again until they are taken.
    found += [outcome(manager.get_steps), len(manager.first_step_infos), outcome(manager.get_steps)]
    return [*found, len(refuses.experiences)]


ERRORS: list[Callable[[], BaseException]] = [
    partial(ValueError, PURPOSE),
    partial(KeyError, PURPOSE),
    partial(OSError, 2, PURPOSE),
    partial(StopIteration, PURPOSE),
    partial(exception.UnityActionException, PURPOSE),
    partial(exception.UnityTimeOutException, PURPOSE),
    partial(exception.UnityWorkerInUseException, 3),
]


def exceptions(make: Maker, error: Callable[[], BaseException]) -> Any:
    """Raise in each method that a worker calls, in the first step or before it."""
    options = run_options()
    options.env_settings.max_lifetime_restarts = 0
    found = []
    for place in ("factory", "reset", "specs", "get_steps", "set_actions", "step"):
        waits = int(place in ("get_steps", "step"))

        def hook(env: Any, waits: int = waits) -> None:
            if env.t >= waits:
                raise error()

        def factory(worker_id: int, channels: Any, place: str = place, hook: Any = hook) -> Any:
            if place == "factory":
                raise error()
            return real(hooks={place: hook})(worker_id, channels)

        def use(factory: Any = factory) -> None:
            manager, _ = started(make, factory, options=options)
            for _ in range(3):
                manager.process_steps(manager.get_steps())

        found.append([place, outcome(use)])
    return found


def attributes(make: Maker) -> Any:
    factory, options = real(), run_options()
    manager = make(factory, 2, options=options)
    worker = manager.env_workers[1]
    found = [manager.env_factory is factory, manager.run_options is options, dict(manager.policies)]
    found += [worker.worker_id, worker.waiting, worker.closed, plain(worker.previous_step)]
    manager.reset({})
    found += [worker.previous_step is manager.first_step_infos[1], plain(worker.previous_step)]
    manager.set_policy("walk", Policy())
    step_until(manager, {0, 1})
    found += [plain(worker.previous_step), plain(worker.previous_all_action_info), dict(manager.agent_managers)]
    manager.close()
    return [*found, worker.closed, len(manager.env_workers), outcome(manager.close)]


def messages(make: Maker) -> Any:
    """The classes that a worker and its manager exchange."""
    names = ("EnvironmentStep", "EnvironmentRequest", "EnvironmentResponse", "EnvironmentCommand", "StepResponse")
    step, request, response, command, result = (class_of(make.whose, name) for name in names)
    empty = step.empty(3)
    found = [plain(empty), repr(empty), empty == ({}, 3, {}, {}), list(empty.name_behavior_ids), step._fields]
    found += [plain(empty._replace(worker_id=4)), pickle.loads(pickle.dumps(empty)) == empty]
    found += [plain(request(command.STEP)), plain(response(command.RESET, 1, 2)), result({}, None, {})._fields]
    for wrong in (request, partial(response, 1), partial(command, 9)):
        with pytest.raises((TypeError, ValueError)) as caught:
            wrong()
        found.append(caught.type)
    is_kept = pickle.loads(pickle.dumps(command.CLOSED)) is command.CLOSED
    return [*found, [(each.name, each.value) for each in command], repr(command.STEP), is_kept]


def results_that_are_kept(make: Maker) -> Any:
    def results(env: Any, name: str) -> Any:
        return decisions([1, 2], [np.full((2, 300), env.t, np.float32)]), ends([])

    manager, _ = started(make, real({"walk": spec(((300,),))}, results))
    steps = [manager.get_steps()[0] for _ in range(25)]
    arrays = [step.current_all_step_result["walk"][0].obs[0] for step in steps]
    found = [[float(array[0, 0]) for array in arrays]]
    arrays[-1][0, 0] = 99  # the learner may write to its results
    found += [float(manager.get_steps()[0].current_all_step_result["walk"][0].obs[0][0, 0]), float(arrays[-2][0, 0])]
    copies = (copy.deepcopy(steps[3]), pickle.loads(pickle.dumps(steps[3])))
    return [*found, [plain(each) == plain(steps[3]) for each in copies]]


class Factory:
    """A factory that is an object, or a method of it."""

    def __call__(self, worker_id: int, channels: Any) -> Any:
        return Real({"walk": spec()}, pair)

    make = __call__


def factories(make: Maker) -> Any:
    def with_default(worker_id: int, channels: Any, extra: int = 1) -> Any:
        return Real({"walk": spec()}, pair)

    def by_place(worker_id: int, channels: Any, /) -> Any:
        return Real({"walk": spec()}, pair)

    every = (Factory(), Factory().make, partial(with_default, extra=3), by_place, lambda *both: Factory()(*both))
    return [plain(started(make, each)[0].get_steps()) for each in every]


class TrainersPolicy:
    """What the trainers' AgentManager asks of a policy."""

    use_recurrent, m_size = False, 0

    def get_action(self, steps: Any, worker_id: int) -> Any:
        action = ActionTuple(continuous=np.full((len(steps), 2), worker_id, np.float32))
        discrete = np.zeros((len(steps), 0), np.float32)
        outputs = {"action": action, "log_probs": LogProbsTuple(continuous=action.continuous, discrete=discrete)}
        return ActionInfo(action, action, outputs, list(steps.agent_id))

    def retrieve_previous_action(self, agents: Any) -> Any:
        return np.zeros((len(agents), 0), np.int32)

    retrieve_previous_memories = retrieve_memories = retrieve_previous_action

    def save_memories(self, *args: Any) -> None: ...

    save_previous_action = remove_memories = remove_previous_action = save_memories


def trajectories(make: Maker) -> Any:
    """The trajectories of the trainers' own agent manager, for episodes that end, by a limit or not, in two workers."""
    name, num = "walk?team=0", 12

    def results(env: Any, behavior: str) -> Any:
        if env.t % 3:
            return decisions([1, 2]), ends([])
        return decisions([1]), ends([2] * (env.t > 0), interrupted=[env.t == 3] * (env.t > 0))

    manager = make.reset(real({name: spec()}, results), 2)
    agents, queue = TrainersAgentManager(TrainersPolicy(), name, StatsReporter("walk"), 5), AgentManagerQueue("walk")
    agents.publish_trajectory_queue(queue)
    manager.set_agent_manager(name, agents)
    manager.set_policy(name, TrainersPolicy())
    seen: Counter[int] = Counter()
    while min(seen[0], seen[1]) < num:
        steps = [step for step in manager.get_steps() if seen[step.worker_id] < num]
        manager.process_steps(steps)
        seen.update(step.worker_id for step in steps)
    found = []
    with contextlib.suppress(AgentManagerQueue.Empty):
        while True:
            one = queue.get_nowait()
            rows = [[plain(row.obs), float(row.reward), bool(row.done), bool(row.interrupted)] for row in one.steps]
            found.append([one.agent_id, one.behavior_id, rows, plain(list(one.next_obs))])
    assert len(found) > 8
    return sorted(found, key=str)


def channels(make: Maker) -> Any:
    """Statistics of each kind of aggregation, and how many messages wait on each channel."""
    incoming = side_channel.IncomingMessage

    def factory(worker_id: int, given: Any) -> Any:
        def results(env: Any, name: str) -> Any:
            for key, value, how in (("x", env.t, 0), ("x", env.t + 1, 0), ("y", 2.0, 1), ("z", 3.0, 2)) * bool(env.t):
                message = side_channel.OutgoingMessage()
                message.write_string(key)
                message.write_float32(value)
                message.write_int32(how)
                given[2].on_message_received(incoming(message.buffer))
            return decisions([1], [np.array([[len(each.message_queue) for each in given[:3]]], np.float32)]), ends([])

        return Real({"walk": spec()}, results)

    manager, _ = started(make, factory)
    found = []
    for number in range(3):
        (step,) = manager.get_steps()
        stats = {name: [(value, how.name) for value, how in each] for name, each in step.environment_stats.items()}
        found.append([plain(step.current_all_step_result), stats, manager.process_steps([step])])
        manager.set_env_parameters({"p": ConstantSettings(seed=0, value=float(number))})
    return found


def without_a_reset(make: Maker) -> Any:
    manager = make(real())
    manager.close()
    found = [outcome(manager.close)]
    manager = make(real())
    found += [manager.reset(config={}), outcome(partial(manager.set_env_parameters, {}))]
    found += [outcome(partial(manager.on_training_started, "walk", None)), plain(manager.get_steps())]
    thread = threading.Thread(target=lambda: found.append(plain(manager.get_steps())))
    thread.start()
    thread.join()
    for absent in ("__enter__", "__len__", "nothing"):
        assert not hasattr(manager, absent)
    return found


def one_env_in_this_process(make: Maker) -> Any:
    closed: list[int] = []
    env = Real({"walk": spec(), "b": spec()}, pair, {"close": lambda env: closed.append(1)})
    manager = class_of(make.whose, "SimpleEnvManager")(env, EnvironmentParametersChannel())
    found = [list(manager.training_behaviors), manager.reset({}), plain(manager.first_step_infos), manager.env is env]
    manager.set_policy("walk", Policy())
    manager.set_policy("b", Policy(2.0))
    agents = AgentManager()
    agents.policy_queue = AgentManagerQueue("walk")
    manager.set_agent_manager("walk", agents)
    steps = manager.get_steps()
    found += [plain(steps), manager.process_steps(steps), len(agents.experiences), plain(manager.previous_step)]
    found += [plain(manager.previous_all_action_info), env.got, manager.on_training_started("walk", None)]
    env.hooks["step"] = raise_(partial(ValueError, PURPOSE))
    found.append(outcome(manager.get_steps))
    env.hooks.pop("step")
    return [*found, outcome(manager.get_steps), manager.close(), manager.close(), closed]


PROGRAMS: list[Callable[[Maker], Any]] = [observations, behaviors_that_come_and_go, policies, actions_of_two_behaviors]
PROGRAMS += [agent_managers, attributes, messages, results_that_are_kept, factories, trajectories, channels]
PROGRAMS += [without_a_reset, one_env_in_this_process, *(partial(exceptions, error=error) for error in ERRORS)]


@pytest.mark.covers("U-7", "U-17")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: getattr(program, "__name__", "exceptions"))
def test_this_program_gives_the_same_with_either(program: Callable[[Maker], Any]) -> None:
    assert_same_with_either(program, Maker)


# ---- what the page lists as different ----------------------------------------------------------------------------------


class OwnSteps(DecisionSteps):  # type: ignore[misc, unused-ignore]
    """A class of the env's own."""


def own_steps(env: Any, name: str) -> Any:
    base = decisions([1])
    return OwnSteps(base.obs, base.reward, base.agent_id, None, base.group_id, base.group_reward), ends([])


def test_results_of_another_form(whose: str) -> None:
    make, is_ours = Maker(whose), whose == OURS
    manager, _ = started(make, real(results=own_steps))
    found = manager.get_steps()[0].current_all_step_result["walk"]
    assert isinstance(found[0], DecisionSteps)
    assert isinstance(found[0], OwnSteps) is not is_ours
    manager, _ = started(make, real(results=lambda env, name: [decisions([1]), TerminalSteps.empty(spec())]))
    assert type(manager.get_steps()[0].current_all_step_result["walk"]) is (tuple if is_ours else list)
    with pytest.raises(TypeError if is_ours else ValueError):
        started(make, real(results=lambda env, name: decisions([1])))[0].get_steps()
    with pytest.raises(TypeError) if is_ours else contextlib.nullcontext():
        started(make, real(results=lambda env, name: (decisions([1]), None)))[0].get_steps()
    make.close()


def test_actions_that_cannot_be_pickled(whose: str) -> None:
    make = Maker(whose)
    manager, _ = started(make, real())
    values = ActionTuple(continuous=np.ones((2, 2), np.float32))
    manager.set_policy("walk", Calls(lambda steps, worker_id: ActionInfo(values, values, {"f": lambda: 1}, [1, 2])))
    with contextlib.nullcontext() if whose == OURS else pytest.raises((AttributeError, pickle.PicklingError)):
        assert manager.get_steps()
    make.close()
