"""Every front-end takes the options of a pool by keyword, names the nearest one for a typo, and has statistics."""

from __future__ import annotations

import pytest

import stepmill
from stepmill.frontends.dm_env import DmEnvironment
from stepmill.frontends.multi_env import SubprocessEnv, create_subprocess_envs
from stepmill.frontends.pettingzoo import AgentVectorEnv, StepmillParallelEnv
from stepmill.spec.errors import UsageError
from stepmill.testing.envs import CountingEnv
from tests.harness.envs_of_other_apis import Tag

MAKERS = {
    "Pool": lambda **keywords: stepmill.Pool([CountingEnv], **keywords),
    "VectorEnv": lambda **keywords: stepmill.VectorEnv([CountingEnv], **keywords),
    "DmEnvironment": lambda **keywords: DmEnvironment(CountingEnv, **keywords),
    "StepmillParallelEnv": lambda **keywords: StepmillParallelEnv(Tag, **keywords),
    "AgentVectorEnv": lambda **keywords: AgentVectorEnv([Tag], **keywords),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_options_are_keywords_and_there_are_statistics(made, make):
    env = made(make(backend="serial", on_fault="truncate", options=stepmill.PoolOptions(tuning={"slots": 2})))
    options = getattr(env, "_pool", env).options
    assert (options.backend, options.on_fault, options.tuning.slots) == ("serial", "truncate", 2)
    assert env.stats().steps == 0


@pytest.mark.parametrize("name", [name for name in MAKERS if name not in ("Pool", "VectorEnv")])
def test_an_option_that_a_front_end_chooses_itself_is_refused(name):
    with pytest.raises(UsageError, match=f"^{name} needs episode_stats=False, .*; leave out episode_stats=True"):
        MAKERS[name](episode_stats=True)


@pytest.mark.parametrize(
    "make",
    [
        *MAKERS.values(),
        lambda **keywords: SubprocessEnv(CountingEnv, **keywords),
        lambda **keywords: create_subprocess_envs([CountingEnv], **keywords),
    ],
    ids=[*MAKERS, "SubprocessEnv", "create_subprocess_envs"],
)
def test_a_typo_names_the_nearest_option(make):
    with pytest.raises(UsageError, match="on_faul is not an option of stepmill; did you mean on_fault"):
        make(on_faul="truncate")
