"""Ids and policies on the command line: what is found, and the error when nothing is."""

from __future__ import annotations

import sys

import gymnasium
import numpy as np
import pytest

from stepmill.observe import catalog
from stepmill.observe.catalog import batch_actions, find_env, load_policy, near_ids
from stepmill.spec.errors import MissingExtraError, UsageError


@pytest.fixture
def module_dir(tmp_path, monkeypatch):
    """The current directory, empty, and off the path again afterwards, with what was imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


@pytest.fixture
def without(monkeypatch):
    """Make modules look as if they were not installed."""

    def hide(*names: str) -> None:
        real = catalog.find_spec
        monkeypatch.setattr(catalog, "find_spec", lambda name: None if name in names else real(name))
        if "ale_py" not in names:
            return
        for env_id in [each for each, spec in gymnasium.registry.items() if "ale_py" in str(spec.entry_point)]:
            monkeypatch.delitem(gymnasium.registry, env_id)

    return hide


def test_an_id_is_resolved_without_building_the_env():
    choice = find_env("CartPole-v1")
    assert (choice.env_id, choice.is_atari) == ("CartPole-v1", False)
    with choice.make() as env:
        assert env.spec.id == "CartPole-v1"


def test_an_id_without_a_version_means_the_newest():
    assert find_env("CartPole").env_id == "CartPole-v1"


@pytest.mark.parametrize(
    ("env_id", "expected"),
    [
        ("CartPol-v1", "did you mean CartPole-v1 or "),
        ("cartpole-v1", "did you mean CartPole-v1?"),
        ("CartPole-v9", "did you mean CartPole-v1 or CartPole-v0"),
        ("CartPole-v", "did you mean CartPole-v1"),
        ("a/b/c/d/zzzz", "use `module:Id` to import the module that registers it"),
        ("", "`module:Id` to import"),
    ],
)
def test_an_unknown_id_is_answered_with_near_names(env_id, expected):
    with pytest.raises(UsageError, match="unknown env id") as raised:
        find_env(env_id)
    assert expected in raised.value.message
    assert "\n" not in raised.value.message


_OWN = """
import gymnasium
from stepmill.testing.envs import CountingEnv

class OwnEnv(CountingEnv):
    pass

def make_own(length=3):
    return OwnEnv(7, length)

gymnasium.register("Known-v0", OwnEnv)
Known = OwnEnv
"""


def test_a_class_or_function_of_a_module_is_an_env(module_dir):
    (module_dir / "own_envs.py").write_text(_OWN)
    sys.path.insert(0, str(module_dir))
    try:
        choice = find_env("own_envs:OwnEnv")
        assert (choice.env_id, choice.is_function, choice.is_atari) == ("own_envs:OwnEnv", True, False)
        assert type(choice.make()).__name__ == "OwnEnv"
        made = find_env("own_envs:make_own", env_kwargs={"length": 9}).make()
        assert (made.identity, made.length) == (7, 9)
        assert not find_env("own_envs:Known").is_function  # an id comes first
        with pytest.raises(UsageError, match=r"unknown env id 'OwnEnw'; did you mean OwnEnv\?"):
            find_env("own_envs:OwnEnw")
        with pytest.raises(UsageError, match="is not an Atari env"):
            find_env("own_envs:OwnEnv", atari=True)
    finally:
        gymnasium.registry.pop("Known-v0")


def test_near_ids_puts_other_versions_and_namespaces_of_the_same_name_first():
    known = ["Bong-v5", "ALE/Pong-v5", "Pong-v0", "Pong-v4", "Walker-v1"]
    assert near_ids("pong-v5", known) == ["Pong-v4", "Pong-v0", "ALE/Pong-v5"]


def test_the_module_of_an_id_is_imported_first(module_dir, monkeypatch):
    monkeypatch.syspath_prepend(str(module_dir))
    (module_dir / "my_envs.py").write_text(
        "import gymnasium\ngymnasium.register('Mine-v0', entry_point='gymnasium.envs.classic_control:CartPoleEnv')\n"
    )
    try:
        assert find_env("my_envs:Mine-v0").env_id == "Mine-v0"
    finally:
        gymnasium.registry.pop("Mine-v0", None)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (None, "ModuleNotFoundError: No module named 'odd_envs'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError"),
    ],
)
def test_a_module_that_cannot_be_imported_is_named_with_the_cause(module_dir, monkeypatch, content, cause):
    monkeypatch.syspath_prepend(str(module_dir))
    if content is not None:
        (module_dir / "odd_envs.py").write_text(content)
    with pytest.raises(UsageError, match="cannot import module 'odd_envs'") as raised:
        find_env("odd_envs:Mine-v0")
    assert cause in raised.value.message


def test_an_id_of_ale_gets_the_atari_preprocessing():
    pytest.importorskip("ale_py")
    pytest.importorskip("cv2")
    choice = find_env("ALE/Pong-v5")
    assert choice.is_atari
    with choice.make() as env:
        obs, _ = env.reset(seed=0)
        assert (obs.shape, obs.dtype) == ((4, 84, 84), np.uint8)
        assert env.unwrapped._frameskip == 1


def test_atari_preprocessing_can_be_left_out():
    pytest.importorskip("ale_py")
    choice = find_env("ALE/Pong-v5", atari=False)
    assert not choice.is_atari
    with choice.make() as env:
        assert env.observation_space.shape == (210, 160, 3)


def test_atari_preprocessing_is_refused_for_other_envs():
    with pytest.raises(UsageError, match="not an Atari env"):
        find_env("CartPole-v1", atari=True)


def test_without_ale_py_an_atari_id_names_the_install(without):
    without("ale_py")
    with pytest.raises(MissingExtraError, match=r"ale_py is not installed; run: pip install 'stepmill\[atari\]'"):
        find_env("ALE/Pong-v5")


def test_without_ale_py_an_unknown_id_is_still_unknown(without):
    without("ale_py")
    with pytest.raises(UsageError, match="unknown env id 'Pongg-v5'"):
        find_env("Pongg-v5")


def test_without_opencv_an_atari_id_names_the_install(without):
    pytest.importorskip("ale_py")
    without("cv2")
    with pytest.raises(MissingExtraError, match=r"cv2 is not installed; run: pip install 'stepmill\[atari\]'"):
        find_env("ALE/Pong-v5")
    assert not find_env("ALE/Pong-v5", atari=False).is_atari


def test_an_env_that_exists_as_a_vector_env_only_is_refused(monkeypatch):
    spec = gymnasium.envs.registration.EnvSpec("OnlyVector-v0", vector_entry_point="somewhere:Env")
    monkeypatch.setitem(gymnasium.registry, "OnlyVector-v0", spec)
    with pytest.raises(UsageError, match="only as a vector env"):
        find_env("OnlyVector-v0")


def test_a_batch_of_actions_is_drawn_alike_from_the_same_seed():
    draws = [batch_actions(gymnasium.spaces.Box(-1, 1, (2,)), 3, seed=5).sample() for _ in range(2)]
    assert draws[0].shape == (3, 2)
    assert np.array_equal(*draws)


def test_a_policy_is_found_in_the_current_directory(module_dir):
    (module_dir / "my_policy.py").write_text(
        "class Agent:\n    @staticmethod\n    def act(obs, space): return 'acted'\n"
    )
    assert load_policy("my_policy:Agent.act")(None, None) == "acted"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("my_policy", "not of the form module:function"),
        (":act", "not of the form module:function"),
        ("my_policy:", "not of the form module:function"),
        ("no_such_module:act", "cannot import module 'no_such_module'"),
        ("my_policy:atc", "module 'my_policy' has no 'atc'"),
        ("my_policy:answer", "is a int, not a function"),
    ],
)
def test_a_policy_that_cannot_be_had_is_answered_with_what_is_wrong(module_dir, path, expected):
    (module_dir / "my_policy.py").write_text("answer = 42\n")
    with pytest.raises(UsageError) as raised:
        load_policy(path)
    assert expected in raised.value.message
