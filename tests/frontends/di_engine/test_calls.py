"""DI-engine's managers: attributes and methods of envs, frames, replays."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from stepmill.frontends.di_engine import AsyncSubprocessEnvManager, BaseEnvManager, SyncSubprocessEnvManager
from stepmill.spec.errors import EnvError
from stepmill.testing.envs import CountingEnv
from stepmill.testing.gates import Gate
from tests.frontends.di_engine.conftest import MakeManager
from tests.frontends.di_engine.envs import ding_envs


@pytest.mark.covers("D-24")
def test_attributes_fan_out_over_the_envs_in_the_order_of_their_ids(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 3)
    assert manager.identity == [0, 1, 2]
    with pytest.raises(AttributeError, match=r"env `<class '.*DingEnv'>` doesn't have the attribute `colour`"):
        _ = manager.colour
    with pytest.raises(RuntimeError, match=r"method\(user_defined\), please override method_name_list"):
        manager.user_defined()
    assert not hasattr(manager, "__no_such_protocol__")
    assert not manager.closed
    names = ["reset", "step", "seed", "close", "enable_save_replay", "render", "reward_shaping", "enable_save_figure"]
    assert manager.method_name_list == names


class Talkative(SyncSubprocessEnvManager):
    """Allows one method more."""

    @property
    def method_name_list(self) -> list[str]:
        return [*super().method_name_list, "user_defined"]


@pytest.mark.covers("D-24", "D-33")
def test_methods_of_the_list_can_be_called_and_no_others(launched: MakeManager) -> None:
    manager = launched(Talkative)
    assert manager.call("user_defined") == {0: 0, 1: 1}
    assert [method() for method in manager.user_defined] == [0, 1]
    assert manager.call("reward_shaping", ["x"], env_ids=[1]) == {1: [1, "x"]}
    with pytest.raises(KeyError, match="not support env cmd: fly"):
        manager.call("fly")
    with pytest.raises(TypeError) as caught:
        manager.call("reward_shaping")
    assert isinstance(caught.value, EnvError)


@pytest.mark.covers("D-7", "D-B15")
def test_frames_come_from_the_envs_that_want_an_action(cls: Any, launched: MakeManager) -> None:
    manager = launched(cls, 3, length=1, auto_reset=False)
    manager.step({1: 1})
    frames = manager.ready_imgs
    assert {env_id: int(frame[0, 0, 0]) for env_id, frame in frames.items()} == {0: 0, 2: 2}
    assert int(manager.render_ready("depth_array")[2][0, 0, 0]) == 102
    with pytest.raises(AssertionError, match="render_mode='ascii'"):
        manager.render_ready("ascii")


@pytest.mark.covers("D-7")
def test_a_gymnasium_env_renders_in_the_mode_it_was_made_with(launched: MakeManager) -> None:
    manager = launched(SyncSubprocessEnvManager, [partial(CountingEnv, i, render_mode="rgb_array") for i in range(2)])
    assert {env_id: frame.shape for env_id, frame in manager.ready_imgs.items()} == {0: (4, 4, 3), 1: (4, 4, 3)}


@pytest.mark.covers("D-B8")
def test_a_question_during_a_step_gets_its_own_answer(launched: MakeManager, gate: Gate) -> None:
    manager = launched(AsyncSubprocessEnvManager, gate=gate, wait_num=1)
    manager.step({0: "gate", 1: 4})
    gate.wait_arrivals()
    gate.open()
    assert manager.identity == [0, 1]  # after the step of env 0, whose timestep is not taken for it
    assert manager.step({1: 5})[0].obs.tolist() == [0, 0, 1]


# ---- replays, figures, rewards ---------------------------------------------------------------------------------------


@pytest.mark.covers("D-25", "G-20/recordings")
def test_every_env_gets_the_folder_of_its_replays_before_its_first_reset(cls: Any, make_manager: MakeManager) -> None:
    manager = make_manager(cls, ding_envs(2))
    manager.enable_save_replay("videos")
    manager.launch()
    assert manager.replay_path == ["videos", "videos"]
    manager.close()
    manager.enable_save_replay(["a", "b"])
    manager.launch()
    assert manager.replay_path == ["a", "b"]


@pytest.mark.covers("D-25")
def test_in_line_an_episode_whose_replay_is_saved_is_not_cut_short(
    make_manager: MakeManager, caplog: pytest.LogCaptureFixture
) -> None:
    manager = make_manager(BaseEnvManager, ding_envs(2))
    manager.enable_save_replay("videos")
    manager.launch()
    manager.reset()
    assert [len(resets) for resets in manager.resets] == [1, 1]
    assert "please don't reset a unfinished env when you enable save replay" in caplog.text
    manager.enable_save_figure(1, "figures")
    assert manager.figure_path == ["", "figures"]
    assert manager.reward_shaping(1, [3]) == [1, 3]
