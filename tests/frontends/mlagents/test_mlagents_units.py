"""The parts of a manager: restart quotas, live agents, specs and exceptions that are sent to the learner."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import stepmill
from stepmill.frontends.mlagents import BatchedStepResult, DecisionSteps, RestartLimits, TerminalSteps
from stepmill.frontends.mlagents.failures import UnityWorkerDied, pack, rebuild
from stepmill.frontends.mlagents.manager import brain_parameters
from stepmill.frontends.mlagents.workers import EngineWorker, EngineWorkerState, LiveAgents, RestartQuota
from stepmill.testing.faulty import ERRORS, MuteError
from tests.harness.unity_envs import ActionSpec, AgentGroupSpec, BehaviorSpec, ObservationSpec


@pytest.mark.covers("U-14")
def test_the_rate_of_restarts_is_limited_per_worker_and_window():
    now_s = 0.0
    quota = RestartQuota(RestartLimits(), 2, lambda: now_s)
    assert quota.take(0)
    assert not quota.take(0)
    assert quota.take(1)
    now_s = 61.0
    assert quota.take(0)
    assert quota.counts == [2, 1]
    assert RestartLimits() == RestartLimits(10, 1, 60.0)


def test_a_worker_makes_allowed_moves_only():
    worker = EngineWorker(0, dict)
    with pytest.raises(stepmill.EngineBug, match="NEW to STEPPING"):
        worker.move(EngineWorkerState.STEPPING)


def decision(*agents: int) -> DecisionSteps:
    ids = np.array(agents, np.int32)
    return DecisionSteps(
        [ids[:, None].astype(np.float32)], ids.astype(np.float32), ids, None, [agent % 2 for agent in agents]
    )


def terminal(*agents: int) -> TerminalSteps:
    ids = np.array(agents, np.int32)
    return TerminalSteps([ids[:, None].astype(np.float32)], ids.astype(np.float32), np.zeros(len(ids), bool), ids)


@pytest.mark.covers("U-14", "U-5")
def test_agents_that_asked_for_no_decision_lately_are_interrupted_too():
    live = LiveAgents()
    live.update({"walk": (decision(1, 2, 3), terminal())})
    live.update({"walk": (decision(3), terminal(2)), "fly": (decision(), terminal())})
    ended: Any = live.make_interrupted()

    assert list(ended) == ["walk"]
    nobody, gone = ended["walk"]
    assert len(nobody) == 0
    assert gone.agent_id.tolist() == [1, 3]
    assert gone.obs[0][:, 0].tolist() == [1.0, 3.0]
    assert gone.interrupted.all()
    assert gone.group_id.tolist() == [1, 1]
    live.clear()
    assert live.make_interrupted() == {}


@pytest.mark.covers("U-14", "U-17")
def test_agents_of_the_first_generation_are_interrupted_as_done_by_a_limit():
    live = LiveAgents()
    ids = np.array([1, 2], np.int32)
    obs, flags = [np.ones((2, 3), np.float32)], np.array([True, False])
    live.update({"walk": BatchedStepResult(obs, ids.astype(np.float32), flags, flags, ids, [np.zeros((2, 4), bool)])})
    ended: Any = live.make_interrupted()["walk"]

    assert ended.agent_id.tolist() == [2]
    assert (ended.done.tolist(), ended.max_step.tolist(), ended.reward.tolist()) == ([True], [True], [0.0])
    assert ended.action_mask[0].shape == (1, 4)
    assert ended.n_agents() == 1
    assert ended.contains_agent(2)
    with pytest.raises(IndexError, match="agent_id 1"):
        ended.get_agent_step_result(1)


@pytest.mark.covers("U-9", "U-17")
@pytest.mark.parametrize(
    "spec",
    [
        BehaviorSpec([ObservationSpec((3,)), ObservationSpec((8, 9, 3))], ActionSpec(0, (3, 2))),
        BehaviorSpec([ObservationSpec((3,)), ObservationSpec((8, 9, 3))], ActionSpec(2, ())),
        AgentGroupSpec([(3,), (8, 9, 3)], 0, (3, 2)),
        AgentGroupSpec([(3,), (8, 9, 3)], 1, 2),
    ],
)
def test_specs_of_both_generations_are_described_in_the_form_of_the_first(spec):
    brain = brain_parameters("walk", spec)
    assert (brain.vector_observation_space_size, brain.number_visual_observations) == (3, 1)
    assert brain.vector_action_space_size == ([3, 2] if brain.vector_action_space_type == "discrete" else [2])
    assert brain.camera_resolutions[0].height == 8


@pytest.mark.covers("U-13", "U-B2")
@pytest.mark.parametrize("name", sorted(ERRORS))
def test_every_exception_arrives_as_its_own_class_or_as_an_env_error_that_says_so(name):
    original = ERRORS[name]()
    rebuilt = rebuild(pack(original, "step"), 3)
    text = str(rebuilt if isinstance(rebuilt, stepmill.EnvError) else rebuilt.__cause__)
    assert type(original).__name__ in text
    assert "env 3" in text
    if isinstance(original, Exception):
        assert isinstance(rebuilt, type(original))
    else:
        assert isinstance(rebuilt, stepmill.EnvError)  # an env that exits must not end the learner
    assert isinstance(original, MuteError) or "deliberate" in text or name in ("mute", "chained", "exit")


class Layout(OSError):
    """An exception whose memory layout no class of ours shares, and which does not pickle."""

    def __init__(self, text: str, *, needed: int) -> None:
        super().__init__(text)


def test_an_exception_that_mixes_with_nothing_is_an_env_error():
    rebuilt = rebuild(pack(Layout("odd", needed=1), "reset"), 0)
    assert type(rebuilt) is stepmill.EnvError
    assert rebuilt.error_type.endswith("Layout")


def test_deaths_in_ml_agents_words_can_be_pickled():
    error = UnityWorkerDied("gone", worker=1, env_ids=[1], signal_name="SIGKILL")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.worker, str(again)) == (UnityWorkerDied, 1, "gone")
