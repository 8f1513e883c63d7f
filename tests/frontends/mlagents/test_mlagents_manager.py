"""Managers of Unity envs without failures. Tests have the names of ML-Agents' own tests of the same behaviour."""

from __future__ import annotations

import importlib
import logging
import os
import sys
import threading
import uuid
from functools import partial
from types import SimpleNamespace

import pytest

import stepmill
from stepmill.frontends.mlagents import (
    EnvironmentStep,
    SimpleEnvManager,
    StepResponse,
    UnityCommunicationException,
    failures,
)
from stepmill.frontends.mlagents.channels import EnvironmentParametersChannel, FloatPropertiesChannel, with_methods
from tests.frontends.mlagents.parts import (
    WALK,
    AgentManager,
    Policy,
    decided,
    deciding,
    ended,
    given_action,
    wait,
    walking,
    with_hooks,
)
from tests.harness.unity_envs import ScriptedBehaviors

ID = uuid.UUID("00000000-0000-0000-0000-000000000007")


@pytest.mark.covers("U-1/processes")
def test_environments_are_created_each_in_a_process_with_its_worker_id(manager_of, script):
    def factory(worker_id, channels):
        env = script(WALK)
        env.identity = (worker_id, os.getpid(), len(channels))
        return env

    manager = manager_of(factory, 3)

    identities = manager._pool.get_attr("identity")
    assert [worker_id for worker_id, _, _ in identities] == [0, 1, 2]
    assert len({pid for _, pid, _ in identities} | {os.getpid()}) == 4
    assert [worker.worker_id for worker in manager.env_workers] == [0, 1, 2]


@pytest.mark.covers("U-3/results", "U-4/actions")
def test_step_takes_steps_for_all_non_waiting_envs_and_returns_the_results_so_far(manager_of, script, gate):
    manager = manager_of(with_hooks(script, 2, {("step", 1): wait(gate.path)}), 3)
    policy = Policy()
    manager.set_policy("walk", policy)
    manager.reset()

    answered: list[int] = []
    while not {0, 1} <= set(answered) or len(answered) < 6:
        answered += [step.worker_id for step in manager.get_steps()]
    gate.wait_arrivals(1)

    assert set(answered) == {0, 1}
    assert policy.asked.count(([1, 2], 2)) == 1  # worker 2 is busy: its policy was called once, and it got one command
    gate.open()
    while 2 not in answered:
        answered += [step.worker_id for step in manager.get_steps()]


@pytest.mark.covers("U-4/actions", "U-17")
def test_a_step_has_the_actions_that_led_to_it(started_of, script):
    manager = started_of(walking(script))
    assert manager.env_workers[0].previous_step.brain_name_to_action_info == {}
    for number in (1.0, 2.0):
        manager.set_policy("walk", Policy(number))
        (step,) = manager.get_steps()
        assert decided(step) == number
        # In the first generation agents whose episode ended get actions, too.
        num_agents = 1 if number == 2.0 and script is ScriptedBehaviors else 2
        assert manager._pool.get_attr("actions")[0]["walk"] == given_action(script, number, num_agents)


def test_before_its_first_reset_a_worker_has_an_empty_step():
    assert EnvironmentStep.empty(3) == ({}, 3, {}, {})
    assert list(EnvironmentStep.empty(3).name_behavior_ids) == []


def test_the_first_step_of_an_env_that_was_never_reset_resets_it(manager_of, script):
    manager = manager_of(walking(script))
    (step,) = manager.get_steps()
    assert deciding(step) == [1, 2]
    assert manager._pool.get_attr("counts")[0]["reset"] == 1


@pytest.mark.covers("U-5", "U-17")
def test_agents_join_and_leave_at_every_step(started_of, script):
    manager = started_of(walking(script, interrupts=[1]))
    seen = [manager.env_workers[0].previous_step, *manager.get_steps(), *manager.get_steps()]

    assert [deciding(step) for step in seen] == [[1, 2], [2], [2, 3]]
    assert [ended(step) for step in seen] == [{}, {1: True}, {}]


@pytest.mark.covers("U-5")
def test_masks_group_ids_and_rewards_arrive(started_of):
    manager = started_of(walking(ScriptedBehaviors, is_discrete=True))
    agents = manager.env_workers[0].previous_step.current_all_step_result["walk"][0]

    assert [mask.tolist() for mask in agents.action_mask] == [[[True, False, False]] * 2, [[False, False]] * 2]
    assert agents.group_id.tolist() == [1, 0]
    assert agents.reward.tolist() == [1.0, 2.0]
    assert agents[2].agent_id == 2
    assert agents[2].group_id == 0
    assert 3 not in agents
    assert len(agents) == 2


@pytest.mark.covers("U-5")
def test_a_behaviour_may_appear_at_any_time_and_one_without_policy_or_agents_gets_no_actions(manager_of, script):
    rows = {"walk": [[1], [1], [1]], "fly": [None, [7], []], "swim": [[9]]}
    manager = manager_of(lambda worker_id, channels: script(rows))
    manager.set_policy("walk", Policy(1.0))
    manager.set_policy("fly", Policy(2.0))
    manager.reset()
    assert list(manager.training_behaviors) == ["walk", "swim"]

    names = [sorted(step.brain_name_to_action_info) for _ in range(3) for step in manager.get_steps()]

    assert names == [["walk"], ["fly", "walk"], ["fly", "walk"]]
    assert set(manager.training_behaviors) == {"walk", "fly", "swim"}
    assert manager._pool.get_attr("actions")[0] == {
        "walk": given_action(script, 1.0),
        "fly": given_action(script, 2.0),  # from the one step in which it had an agent
    }


@pytest.mark.covers("U-6/waits", "U-6/order")
def test_reset_collects_results_from_all_envs_in_worker_order_after_steps_have_finished(started_of, script, gate):
    manager = started_of(with_hooks(script, 0, {("step", 1): wait(gate.path)}), 4)
    manager.set_policy("walk", Policy())
    manager.get_steps()
    gate.wait_arrivals(1)
    gate.open()

    assert manager.reset() == 4
    assert [step.worker_id for step in manager.first_step_infos] == [0, 1, 2, 3]
    assert all(step.brain_name_to_action_info == {} for step in manager.first_step_infos)
    assert [worker.previous_step for worker in manager.env_workers] == manager.first_step_infos
    counts = manager._pool.get_attr("counts")
    assert counts[0]["step"] == 1
    assert [each["reset"] for each in counts] == [2] * 4


@pytest.mark.covers("U-6/same_time")
def test_a_reset_resets_all_envs_at_the_same_time(manager_of, script, gate):
    manager = manager_of(walking(script, hooks={("reset", 1): wait(gate.path)}), 2)
    opener = threading.Thread(target=lambda: (gate.wait_arrivals(2), gate.open(2)))
    opener.start()
    assert manager.reset() == 2
    opener.join()


@pytest.mark.covers("U-7", "U-B3")
def test_reset_passes_reset_params_and_none_is_the_default(started_of, script):
    manager = started_of(walking(script), 2)
    manager.reset({"gravity": 9.5, "size": 2})

    assert manager.get_properties == {"gravity": 9.5, "size": 2.0}
    for sent in manager._pool.get_attr("sent"):
        assert b"gravity" not in sent[0]
        assert b"gravity" in sent[1]
        assert b"size" in sent[1]


@pytest.mark.covers("U-9", "U-B8")
def test_training_behaviors_collects_results_from_all_envs(manager_of, script):
    manager = manager_of(lambda worker_id, channels: script({f"walk{worker_id}": [[1]]}, shape=(4, 5, 3)), 3)

    assert sorted(manager.training_behaviors) == ["walk0", "walk1", "walk2"]
    brain = manager.external_brains["walk1"]
    assert brain.camera_resolutions == [(4, 5, 3)]
    assert brain.vector_observation_space_size == 0
    assert brain.vector_action_space_type == "continuous"
    assert brain.vector_action_space_size == [2]


@pytest.mark.covers("U-9", "U-17")
def test_specs_are_the_objects_of_the_env(manager_of, script):
    manager = manager_of(walking(script, is_discrete=True))
    env = script(WALK, is_discrete=True)
    own = env.behavior_specs if script is ScriptedBehaviors else {"walk": env.get_agent_group_spec("walk")}
    assert manager.training_behaviors == own
    assert type(manager.training_behaviors["walk"]) is type(own["walk"])


@pytest.mark.covers("U-9")
def test_a_spec_whose_class_only_the_worker_can_import_is_an_error_that_names_it(manager_of, tmp_path):
    (tmp_path / "only_in_the_worker.py").write_text("class Spec: ...\n")

    def factory(worker_id, channels):
        sys.path.insert(0, str(tmp_path))

        class Env(ScriptedBehaviors):
            behavior_specs = {"walk": importlib.import_module("only_in_the_worker").Spec()}

        return Env(WALK)

    with pytest.raises(stepmill.StepmillError, match="only_in_the_worker"):
        manager_of(factory)


@pytest.mark.covers("U-B8")
def test_queries_do_not_wait_for_a_step(manager_of, script, gate):
    manager = manager_of(with_hooks(script, 0, {("step", 1): wait(gate.path)}), 2)
    manager.reset({"gravity": 1.0})
    manager.get_steps()
    gate.wait_arrivals(1)

    assert manager.env_workers[0].waiting
    assert manager.get_properties == {"gravity": 1.0}
    assert "walk" in manager.external_brains
    gate.open()


@pytest.mark.covers("U-15/policies")
def test_advance_passes_results_on_and_takes_the_newest_policy(manager_of, script):
    manager = manager_of(walking(script))
    agents = AgentManager()
    manager.set_agent_manager("walk", agents)
    manager.set_policy("walk", Policy(1.0))
    assert agents.policy is manager.policies["walk"]
    assert manager.reset() == 1
    assert agents.num_ended == 1
    assert agents.experiences == []

    for number in (2.0, 3.0):
        agents.policy_queue.put(Policy(number))
    assert manager.advance() == 1

    assert agents.policy.number == 3.0
    assert agents.policy_queue.empty()
    first, second = agents.experiences
    *results, worker_id, info = second
    assert len(results) == (2 if script is ScriptedBehaviors else 1)
    assert worker_id == 0
    assert info.outputs == {"number": 3.0}
    assert first[-1].agent_ids == []
    assert agents.stats == [({}, 0), ({}, 0)]


def test_advance_takes_one_policy_from_a_queue_that_never_ends(manager_of, script):
    manager = manager_of(walking(script))
    agents = AgentManager()
    agents.policy_queue = SimpleNamespace(get_nowait=lambda: Policy(5.0))  # as a mock of a queue
    manager.set_agent_manager("walk", agents)
    manager.reset()
    assert manager.advance() == 1
    assert agents.policy.number == 5.0


def test_a_closed_manager_raises_what_ml_agents_raises(started_of, script):
    manager = started_of(walking(script))
    manager.close()
    for call in (manager.get_steps, manager.advance, manager.reset, partial(manager.set_env_parameters, {"wind": 1.0})):
        with pytest.raises(UnityCommunicationException, match=r"send failed\. The manager is closed") as caught:
            call()
        assert isinstance(caught.value, stepmill.ClosedPoolError)


def test_statistics_that_were_not_sent_are_empty_and_may_be_left_out_of_a_response():
    assert with_methods({"speed": [(1.5, 1)]})["nothing"] == []
    assert StepResponse({}, None).environment_stats == {}


@pytest.mark.covers("U-15/policies")
def test_a_behaviour_without_agent_manager_is_a_warning(started_of, script, caplog):
    manager = started_of(walking(script))
    with caplog.at_level(logging.WARNING, "stepmill.mlagents"):
        assert manager.process_steps(manager.get_steps()) == 1
    assert "Agent manager was not created for behavior id walk" in caplog.text


@pytest.mark.covers("U-15/policies")
def test_channels_with_training_started_are_called(manager_of, script):
    class Listener(FloatPropertiesChannel):
        def __init__(self, worker_id):
            super().__init__(channel_id=ID)
            self.told = []

        def training_started(self, name, settings):
            self.told.append((name, settings))

        def read(self):
            return self.told

    manager = manager_of(walking(script), 2, channel_factory=lambda worker_id: [Listener(worker_id)])
    manager.on_training_started("walk", {"steps": 7})
    manager.reset()
    assert manager.call_channel(ID, "read") == ([("walk", {"steps": 7})],) * 2


@pytest.mark.covers("U-16", "U-17")
@pytest.mark.parametrize("channel", [FloatPropertiesChannel, EnvironmentParametersChannel])
def test_a_simple_manager_does_the_same_in_this_process(script, channel):
    params = channel()
    env = script(WALK, side_channels=[params])
    manager = SimpleEnvManager(env, params)
    manager.set_policy("walk", Policy(4.0))

    assert manager.reset({"gravity": 9.5}) == 1
    assert b"gravity" in env.sent[0]
    (step,) = manager.get_steps()

    assert step.worker_id == 0
    assert deciding(step) == [2]
    assert decided(step) == 4.0
    assert env.actions == {"walk": given_action(script, 4.0, 2)}
    assert list(manager.training_behaviors) == ["walk"]
    assert manager.external_brains["walk"].brain_name == "walk"
    assert manager.get_properties == ({"gravity": 9.5} if channel is FloatPropertiesChannel else {})
    manager.set_env_parameters(None)
    manager.close()
    assert env.counts["close"] == 1


def test_wrong_arguments_are_refused(manager_of):
    factory = walking(ScriptedBehaviors)
    with pytest.raises(stepmill.UsageError, match="n_env"):
        manager_of(factory, 0)
    with pytest.raises(stepmill.UsageError, match="EngineConfig"):
        manager_of(factory, 1, "fast")
    manager = manager_of(factory)
    with pytest.raises(stepmill.UsageError, match="gravity"):
        manager.reset({"gravity": "much"})


def test_a_step_looks_for_no_package(started_of, script, monkeypatch):
    manager = started_of(walking(script))
    manager.get_steps()

    def refuse(name: str) -> None:
        raise AssertionError(f"a step has imported {name}")

    monkeypatch.setattr(failures, "import_module", refuse)
    assert len(manager.get_steps()) == 1
