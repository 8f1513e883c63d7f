"""The arguments of other packages' envs that type checkers know as keywords of `make_vec`."""

from __future__ import annotations

import inspect

import gymnasium
import pytest
from gymnasium.envs.registration import load_env_creator

import stepmill
from stepmill.frontends.gymnasium.env_keywords import EnvKeywords

ale_py = pytest.importorskip("ale_py")  # it has no wheels for CPython 3.15


@pytest.mark.filterwarnings("ignore")
def test_they_are_all_arguments_of_the_envs_that_gymnasium_and_ale_py_register():
    gymnasium.register_envs(ale_py)
    wanted: set[str] = set()
    for spec in gymnasium.registry.values():
        if not str(spec.entry_point).startswith(("gymnasium.", "ale_py.")):
            continue
        try:
            creator = load_env_creator(spec.entry_point)
        except (ImportError, gymnasium.error.DependencyNotInstalled):  # its simulator is missing
            continue
        parameters = inspect.signature(creator).parameters.values()
        wanted |= {each.name for each in parameters if each.kind is not each.VAR_KEYWORD}
    assert {"sutton_barto_reward", "frameskip", "map_name"} <= wanted
    assert wanted <= set(EnvKeywords.__annotations__)


def test_a_keyword_that_is_like_no_option_gets_no_suggestion():
    with pytest.raises(stepmill.EnvError) as raised:
        stepmill.make_vec("CartPole-v1", 2, gravity=3, backend="serial")
    assert "did you mean" not in str(raised.value)
