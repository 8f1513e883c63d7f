"""Options say what is wrong with them before anything starts."""

import dataclasses
import pickle
import re

import gymnasium
import numpy as np
import pytest

from stepmill import _native
from stepmill.frontends.pool_options import options_of
from stepmill.spec.errors import UsageError
from stepmill.spec.options import (
    RECORDS,
    AutoresetMode,
    BackendName,
    Context,
    EnvState,
    OnFault,
    OptionKeywords,
    PoolOptions,
    Resets,
    Restarts,
    Seeding,
    merge_options,
)
from stepmill.spec.ray_options import RayOptions
from stepmill.spec.records import Record, default_of
from tests.harness.scripts import ROOT


def test_strings_and_foreign_enums_become_our_enums():
    options = PoolOptions(
        backend="thread", context="spawn", seeding="fixed", autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    assert options.backend is BackendName.THREAD
    assert options.context is Context.SPAWN
    assert options.seeding is Seeding.FIXED
    assert options.autoreset_mode is AutoresetMode.SAME_STEP


def test_autoreset_modes_are_gymnasiums():
    theirs = {mode.name: mode.value for mode in gymnasium.vector.AutoresetMode}
    assert theirs == {mode.name: mode.value for mode in AutoresetMode}


def test_numpy_numbers_become_python_numbers():
    options = PoolOptions(num_workers=np.int64(3), tuning={"spin_us": np.float32(5)}, copy=np.True_)
    assert type(options.num_workers) is int
    assert type(options.tuning.spin_us) is float
    assert options.copy is True


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"backend": "gpu"}, r"backend='gpu' is not one of 'auto', 'serial'"),
        ({"backend": 3}, r"backend=3 is not a Backend"),
        ({"backend": "dask"}, r"backend='dask' is not one of .* 'kernel', 'ray'$"),
        ({"ray": {"num_nodes": 2}}, r"only for backend='ray'"),
        ({"ray": RayOptions(num_nodes=2)}, r"only for backend='ray'"),
        ({"ray": {"num_nodes": 0}}, r"ray.num_nodes=0 must be a whole number, 1 or more, or None"),
        ({"resets": {"retries": -1}}, r"resets.retries=-1 must be a whole number, 0 or more$"),
        ({"resets": 3}, r"resets=3 is not a record; give stepmill.Resets\(...\), or .* resets={'retries': ...}"),
        ({"restarts": {"on_raise": "later"}}, r"restarts.on_raise='later' is not one of 'raise', 'truncate', 'replay'"),
        ({"backend": "ray", "context": "fork"}, r"cannot fork this program on other machines"),
        ({"context": "thread"}, r"context='thread' is not one of 'forkserver'"),
        ({"autoreset_mode": "Never"}, r"autoreset_mode='Never' is not one of 'NextStep'"),
        ({"seeding": "lucky"}, r"seeding='lucky' is not one of"),
        ({"num_workers": -1}, r"num_workers=-1 must be a whole number, 0 or more, or None"),
        ({"num_workers": True}, r"num_workers=True must be a whole number"),
        ({"num_workers": 1.5}, r"num_workers=1.5 must be a whole number"),
        ({"envs_per_worker": 0}, r"envs_per_worker=0 must be a whole number, 1 or more"),
        ({"num_workers": 2, "envs_per_worker": 2}, r"both given; give at most one"),
        ({"num_workers": 0, "backend": "process"}, r"leaves the process backend without workers"),
        ({"tuning": {"timers_every": -1}}, r"tuning.timers_every=-1 must be a whole number"),
        ({"workers": {"init": 3}}, r"workers.init=3 must be a function without arguments"),
        ({"workers": {"init": print}, "backend": "envpool"}, "workers.init"),
        ({"workers": {"init": print}, "backend": "kernel"}, "workers.init"),
        ({"tuning": {"slots": 0}}, r"tuning.slots=0 must be a whole number, 1 or more$"),
        ({"tuning": {"slots": 253}}, "use 252 or less"),
        ({"tuning": {"slots": None}}, r"tuning.slots=None"),
        ({"start": {"timeout_s": 0}}, r"start.timeout_s=0 must be a number of seconds, more than 0$"),
        ({"workers": {"call_timeout_s": float("nan")}}, r"workers.call_timeout_s=nan"),
        ({"workers": {"call_timeout_s": float("inf")}}, r"workers.call_timeout_s=inf"),
        ({"tuning": {"spin_us": "5"}}, r"tuning.spin_us='5' must be a number of microseconds, 0 or more, or None"),
        ({"copy": 1}, r"copy=1 must be True or False"),
        ({"episode_stats": "yes"}, r"episode_stats='yes' must be True or False"),
        ({"copy": np.array(True)}, r"copy=array\(True\) must be True or False"),
        ({"workers": {"env": {"A": 1}}}, r"workers.env=.* must map names"),
        ({"workers": {"env": ["A=1"]}}, r"workers.env=.* must map names"),
        ({"workers": {"env": {"A=B": "1"}}}, r"workers.env=.* must map names"),
    ],
)
def test_a_wrong_value_is_refused_with_what_to_do(wrong, text):
    with pytest.raises(UsageError, match=text):
        PoolOptions(**wrong)


def test_what_replaces_a_lost_node_is_one_of_three_words():
    with pytest.raises(UsageError, match=r"ray.replacement='never' is not one of 'spread', 'wait', 'raise'"):
        RayOptions(replacement="never")


def test_spares_are_refused_where_no_order_of_them_is_that_of_the_data():
    with pytest.raises(UsageError, match=r"resets.spare_envs does not work with autoreset_mode SAME_STEP"):
        PoolOptions(resets={"spare_envs": 1}, autoreset_mode="SameStep")
    with pytest.raises(UsageError, match=r"does not support resets.spare_envs: EnvPool .*resets its envs itself"):
        PoolOptions(resets={"spare_envs": 1}, backend="envpool")


def test_options_are_frozen_and_pickle():
    options = PoolOptions(workers={"env": {"A": "1"}})
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.tuning.slots = 3
    assert pickle.loads(pickle.dumps(options)) == options


def test_the_callers_dict_is_not_kept():
    variables = {"A": "1"}
    options = PoolOptions(workers={"env": variables})
    variables["B"] = "2"
    assert options.workers.env == {"A": "1"}


def test_keywords_go_over_defaults_and_agree_with_options():
    assert merge_options(None, {"backend": "serial"}).backend is BackendName.SERIAL
    assert merge_options(PoolOptions(num_workers=3), {"num_workers": None}).num_workers == 3
    assert merge_options(PoolOptions(num_workers=3), {"num_workers": 3, "context": "spawn"}).num_workers == 3
    assert merge_options(PoolOptions(context="spawn"), {"context": Context.SPAWN}).context is Context.SPAWN
    assert merge_options(PoolOptions(), {"workers": {"threads": None}}).workers.threads is None


def test_a_callers_default_holds_where_nothing_else_is_chosen():
    assert merge_options(None, {}, backend="process").backend is BackendName.PROCESS
    assert merge_options(PoolOptions(backend="thread"), {}, backend="process").backend is BackendName.THREAD
    assert merge_options(None, {"backend": "serial"}, backend="process").backend is BackendName.SERIAL


def test_a_keyword_that_contradicts_the_options_is_refused():
    with pytest.raises(UsageError, match="num_workers is given twice: 2, and 3 in options"):
        merge_options(PoolOptions(num_workers=3), {"num_workers": 2})
    with pytest.raises(UsageError, match="copy is given twice: False, and True in options"):
        merge_options(PoolOptions(copy=True), {"copy": False})
    with pytest.raises(UsageError, match="both given"):
        merge_options(PoolOptions(envs_per_worker=3), {"num_workers": 2})


def test_what_a_front_end_chooses_may_be_given_with_the_same_value_only():
    fixed = {"autoreset_mode": AutoresetMode.SAME_STEP, "num_episodes": None}
    for options in (None, PoolOptions(autoreset_mode="SameStep")):
        assert options_of("Mine", options, {"num_episodes": None}, fixed).autoreset_mode is AutoresetMode.SAME_STEP
    for options, keywords in ((None, {"autoreset_mode": "NextStep"}), (PoolOptions(num_episodes=2), {})):
        with pytest.raises(UsageError, match=r"^Mine needs (.*)=.*, which is set for you; leave out \1="):
            options_of("Mine", options, keywords, fixed)


def test_a_keyword_is_checked_together_with_the_options():
    merged = merge_options(PoolOptions(seeding="per_episode"), {"on_fault": "replay"})
    assert (merged.seeding, merged.on_fault) == (Seeding.PER_EPISODE, OnFault.REPLAY)


@pytest.mark.parametrize(
    ("typo", "near"), [("on_faul", "on_fault"), ("nworkers", "num_workers"), ("step_timeout", "step_timeout_s")]
)
def test_a_typo_names_the_nearest_option(typo, near):
    for make in (lambda: PoolOptions(**{typo: 1}), lambda: merge_options(None, {typo: 1})):
        with pytest.raises(UsageError, match=f"^{typo} is not an option of stepmill; did you mean {near}") as caught:
            make()
        assert len(str(caught.value)) < 200
    with pytest.raises(UsageError, match=r"zzz is not an option of stepmill; help\(stepmill.PoolOptions\)"):
        PoolOptions(zzz=1)


@pytest.mark.parametrize(
    ("old", "text"),
    [
        ({"spare_envs": 2}, r"^spare_envs: give it in the record resets: resets={'spare_envs': 2}$"),
        ({"reset_retries": 2, "reset_retry_in": "new"}, r"resets={'retries': 2, 'retry_in': 'new'}$"),
        ({"overlap_resets": True}, r"resets={'overlap': True}$"),
        ({"start_timeout_s": 5}, r"start={'timeout_s': 5}$"),
        ({"worker_threads": 2, "affinity": [0]}, r"workers={'threads': 2, 'affinity': \[0\]}$"),
        ({"on_raise": OnFault.RAISE}, r"restarts={'on_raise': 'raise'}$"),
        ({"num_nodes": 2}, r"ray={'num_nodes': 2}$"),
    ],
)
def test_an_option_of_a_record_that_is_given_beside_it_names_the_text_that_replaces_it(old, text):
    for make in (lambda: PoolOptions(**old), lambda: merge_options(None, old)):
        with pytest.raises(UsageError, match=text):
            make()


def test_a_record_is_given_as_an_object_or_as_a_mapping():
    given = PoolOptions(resets={"spare_envs": 2}, restarts=Restarts(max_restarts=3))
    assert given == PoolOptions(resets=Resets(spare_envs=2), restarts={"max_restarts": 3})
    with pytest.raises(UsageError, match="spares is not an option of resets; did you mean spare_envs"):
        Resets(spares=2)


def test_the_fields_of_records_are_merged_one_by_one():
    options = PoolOptions(resets={"spare_envs": 2})
    for more in ({"retries": 1}, Resets(retries=1), {"retries": 1, "spare_envs": 2}):
        assert merge_options(options, {"resets": more}).resets == Resets(spare_envs=2, retries=1)
    with pytest.raises(UsageError, match=r"resets.spare_envs is given twice: 1, and 2 in options"):
        merge_options(options, {"resets": {"spare_envs": 1}})


def test_what_is_no_pool_options_is_refused_with_what_to_write():
    with pytest.raises(UsageError, match=r"options is a dict; give stepmill.PoolOptions\(...\), or .*copy=True"):
        merge_options({"copy": True}, {})


def test_the_keywords_are_the_fields_of_the_options():
    fields = {field.name: field.type for field in dataclasses.fields(PoolOptions)}
    assert set(OptionKeywords.__annotations__) == set(fields)
    assert {kind._option for kind in RECORDS} == {
        name for name in fields if isinstance(default_of(PoolOptions, name), Record)
    }


def test_native_code_uses_the_numbers_of_env_states():
    assert {state.name: getattr(_native, f"ENV_{state.name}") for state in EnvState} == {
        state.name: state.value for state in EnvState
    }


def test_the_page_for_upgrades_has_each_option_of_a_record_and_the_text_of_its_error():
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)\.(\w+)` \|$", (ROOT / "docs/upgrading.md").read_text(), re.MULTILINE)
    paths = {
        f"{kind._option}.{leaf}" for kind in RECORDS if kind is not RayOptions for leaf in kind.__dataclass_fields__
    }
    assert rows
    assert {f"{option}.{leaf}" for _, option, leaf in rows} <= paths  # newer ones never were at the top
    for old, option, leaf in rows:
        with pytest.raises(UsageError, match=f"^{old}: give it in the record {option}: {option}={{'{leaf}': 1}}$"):
            PoolOptions(**{old: 1})


def test_an_old_name_of_a_ray_option_says_what_replaces_it():
    for old, instead in RayOptions._gone.items():
        with pytest.raises(UsageError, match=f"^ray.{old} is gone; {re.escape(instead)}$"):
            PoolOptions(backend="ray", ray={old: 1})
        assert f"`RayOptions({old}=...)`" in (ROOT / "docs/upgrading.md").read_text()
