"""Managers of real `UnityEnvironment`s, to which a player of ours speaks ML-Agents' protocol. Both generations of mlagents-envs."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

pytest.importorskip("mlagents_envs", reason="make test-mlagents has it")

from stepmill.frontends.mlagents import (
    ManagerOptions,
    RestartLimits,
    SubprocessEnvManager,
    UniformSettings,
    UnityEnvironmentException,
    UnityException,
    UnityTimeOutException,
)
from stepmill.frontends.mlagents.channels import EngineConfig, EngineConfigurationChannel, RawBytesChannel
from stepmill.frontends.mlagents.failures import load
from stepmill.spec.errors import UsageError
from tests.frontends.mlagents import protocol
from tests.frontends.mlagents.parts import Policy, deciding, ended, step_until
from tests.harness.pools import keep_closed
from tests.harness.unity_envs import ScriptedBehaviors, ScriptedGroups

# UnityEnvironment kills a player that does not end, and does not wait for it.
pytestmark = [pytest.mark.mlagents, pytest.mark.orphans, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

IS_OLD = load("base_env", "BatchedStepResult") is not None
HANG_S = 60.0


@pytest.fixture
def executable(tmp_path: Path) -> Path:
    """The player as a built game."""
    return protocol.make_game(tmp_path)


@pytest.mark.covers("U-1/channels", "U-7")
def test_factories_get_the_side_channels_that_their_version_of_mlagents_passes(tmp_path: Path) -> None:
    def factory(worker_id: int, side_channels: Any) -> Any:
        (tmp_path / str(worker_id)).write_text(" ".join(type(each).__name__ for each in side_channels))
        return (ScriptedGroups if IS_OLD else ScriptedBehaviors)(side_channels=side_channels)

    manager = SubprocessEnvManager(factory, None, 2, context="fork")
    manager.reset({"wind": 2.0})
    assert manager.get_properties == {"wind": 2.0}
    old, new = ("FloatProperties", "EngineConfiguration"), ("EnvironmentParameters", "EngineConfiguration", "Stats")
    wanted = " ".join(
        f"{name}SideChannel" if name == "Stats" else f"{name}Channel" for name in (old if IS_OLD else new)
    )
    assert [(tmp_path / str(worker_id)).read_text() for worker_id in range(2)] == [wanted] * 2
    with pytest.raises(UsageError, match="'wind' is a sampler") if IS_OLD else contextlib.nullcontext():
        manager.reset({"wind": UniformSettings(0.0, 1.0)})
    manager.close()


def make_env(program: Path, base_port: int, timeout_s: int, troubles: Any, worker_id: int, channels: Any) -> Any:
    from mlagents_envs.environment import UnityEnvironment

    words = [f"--log={program.parent / f'log{worker_id}'}", *troubles.get(worker_id, ())]
    extra = {"args": words} if IS_OLD else {"additional_args": words}
    name = str(program).removesuffix(".x86_64")
    return UnityEnvironment(
        name, worker_id, base_port=base_port, timeout_wait=timeout_s, side_channels=channels, **extra
    )


@pytest.fixture
def manager_of(executable: Path) -> Any:
    """Build managers of players: `troubles` are arguments of a worker's player."""

    def build(n_env: int = 1, troubles: Any = None, timeout_s: int = 20, engine: Any = None, **options: Any) -> Any:
        factory = partial(make_env, executable, protocol.free_ports(n_env), timeout_s, troubles or {})
        manager = SubprocessEnvManager(factory, engine, n_env, options=ManagerOptions(**options))
        for name in ("walk", "see"):
            manager.set_policy(name, Policy())
        return manager

    yield from keep_closed(build)


def trouble(kind: str, at: int, flag: Path | None = None) -> list[str]:
    return [f"--trouble={kind}", f"--at={at}", *([] if flag is None else [f"--flag={flag}"])]


@pytest.mark.covers("U-17", "U-5")
def test_agents_of_a_real_env_are_stepped_with_the_actions_they_were_given(manager_of):
    manager = manager_of(2, is_deterministic=True)
    assert manager.reset() == 2
    first = manager.env_workers[0].previous_step.current_all_step_result
    see = first["see"][0] if not IS_OLD else first["see"]
    assert see.obs[0].shape == (1, *protocol.IMAGE)
    assert see.agent_id.tolist() == [7]

    for turn in (1, 2):
        for step in manager.get_steps():
            assert deciding(step) == ([1, 2] if turn == 1 else [2])
            assert ended(step) == ({} if turn == 1 else {1: True})
            agents = step.current_all_step_result["walk"]
            told = (agents[0] if not IS_OLD else agents).obs[0]
            assert told[-1].tolist() == [2.0, turn, 2.0] or IS_OLD  # two agents were given 1 each
    assert sorted(manager.training_behaviors) == ["see", "walk"]
    brain = manager.external_brains["walk"]
    assert (brain.vector_observation_space_size, brain.vector_action_space_size) == (3, [2])
    assert manager.external_brains["see"].camera_resolutions == [protocol.IMAGE]


@pytest.mark.covers("U-2", "U-7", "U-8")
def test_side_channels_reach_the_player_and_come_back(manager_of, executable):
    raw = RawBytesChannel(protocol.UNKNOWN_ID)
    manager = manager_of(engine=EngineConfig(width=320, height=200), channel_factory=lambda worker_id: [raw])
    config: dict[str, Any] = {"gravity": 9.5}
    if not IS_OLD:
        config["mass"] = UniformSettings(1.0, 2.0, seed=3)
    manager.reset(config)
    (step,) = manager.get_steps()

    first, *_ = (executable.parent / "log0").read_text().split()
    sent = bytes.fromhex(first)
    assert np.array([320, 200], "<i4").tobytes() in sent
    assert b"gravity" in sent
    assert IS_OLD or b"mass" in sent
    stats = {name: [(x, method.name) for x, method in values] for name, values in step.environment_stats.items()}
    assert stats == ({} if IS_OLD else {"speed": [(1.0, "MOST_RECENT")]})
    assert manager.get_properties == {"gravity": 9.5, **({"wind": 0.5} if IS_OLD else {})}
    assert manager.call_channel(protocol.UNKNOWN_ID, "get_and_clear_received_messages") == ([b"??"],)


@pytest.mark.covers("U-8")
def test_two_channels_of_one_id_are_refused(manager_of):
    manager = manager_of(channel_factory=lambda worker_id: [RawBytesChannel(EngineConfigurationChannel().channel_id)])
    with pytest.raises(UnityEnvironmentException, match="two side channels"):
        manager.reset()


@pytest.mark.covers("U-14", "U-B9", "U-B1", "U-B4", "U-17")
def test_one_player_killed_one_hung_one_stopped_and_the_others_continue(manager_of, tmp_path):
    troubles = {
        0: trouble("die", 3, tmp_path / "died"),
        1: trouble("hang", 3, tmp_path / "hung"),
        2: trouble("stop", 3),
    }
    manager = manager_of(4, troubles, step_timeout_s=3.0, restarts=RestartLimits(1, 1))
    manager.reset()

    steps = step_until(manager, lambda steps: manager.restart_counts == [1, 1, 0, 0] and manager.stopped_workers == [2])
    steps += step_until(manager, lambda steps: {0, 1, 3} <= {step.worker_id for step in steps if deciding(step)})

    assert manager.restart_counts == [1, 1, 0, 0]
    lost = [step for step in steps if step.worker_id in (0, 1, 2) and ended(step).get(2)]
    assert {step.worker_id for step in lost} == {0, 1, 2}  # agent 2 never ends by itself: it was interrupted
    assert manager.reset() == 3


@pytest.mark.covers("U-14")
@pytest.mark.parametrize(("kind", "timeout_s"), [("die", 10), ("hang", 2)])
def test_beyond_its_quota_the_envs_own_exception_is_raised(manager_of, kind, timeout_s):
    manager = manager_of(1, {0: trouble(kind, 2)}, restarts=RestartLimits(0), timeout_s=timeout_s)
    manager.reset()
    with pytest.raises(UnityException) as caught:
        step_until(manager, lambda steps: False)
    is_late = IS_OLD or kind == "hang"
    assert isinstance(caught.value, UnityTimeOutException if is_late else UnityEnvironmentException)
    assert is_late or "SIGKILL" in str(caught.value)


@pytest.mark.covers("U-13")
def test_a_player_that_does_not_connect_is_an_error_of_reset(manager_of, executable):
    executable.write_text("#!/bin/sh\nexec sleep 30\n")
    manager = manager_of(1, timeout_s=2)
    with pytest.raises(UnityTimeOutException):
        manager.reset()


@pytest.mark.covers("U-10/tree")
def test_the_librarys_own_timers_are_added_up(manager_of):
    manager = manager_of(2, is_deterministic=True)
    manager.reset()
    manager.get_steps()
    root = manager.get_timer_tree()["children"]["workers"]["children"]["worker_root"]
    assert root["children"]["mlagents_envs"]["children"]["UnityEnvironment.step"]["count"] == 2
    assert root["children"]["envs"]["children"]["env.step"]["count"] == 2


@pytest.mark.covers("U-12")
def test_close_ends_the_players(manager_of):
    manager = manager_of(2)
    manager.reset()
    players = [each for each in psutil.Process().children(recursive=True) if "player.py" in " ".join(each.cmdline())]
    assert len(players) == 2
    manager.close()
    psutil.wait_procs(players, timeout=HANG_S)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in players)
