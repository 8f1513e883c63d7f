"""Timers of envs and of the learner as one tree, and gauges, over all workers."""

from __future__ import annotations

import threading
import time

import pytest

import stepmill
from stepmill import timers
from stepmill.testing.envs import CountingEnv
from tests.harness.pools import begun


@pytest.fixture(autouse=True)
def clean():
    timers.clear()
    yield
    timers.disable()
    timers.clear()


class TimedEnv(CountingEnv):
    """Times its steps, in two levels, and gauges its clock."""

    def step(self, action):
        with timers.timed("physics"):
            for _ in range(2):
                with timers.timed("solve"):
                    pass
        timers.gauge("t", self.num_steps + 10 * self.identity)
        return super().step(action)


def timed_envs(num_envs, length=50):
    return [lambda identity=identity: TimedEnv(identity, length) for identity in range(num_envs)]


def test_timers_nest_and_count():
    timers.enable()
    for _ in range(3):
        with timers.timed("outer"):
            with timers.timed("inner"):
                time.sleep(0.001)
            with timers.timed("inner"):
                pass
    tree = timers.snapshot()
    outer = tree["children"]["outer"]
    inner = outer["children"]["inner"]
    assert (tree["name"], outer["count"], inner["count"]) == ("root", 3, 6)
    assert tree["total"] >= outer["total"] >= inner["total"] >= 0.003
    assert outer["self"] == pytest.approx(outer["total"] - inner["total"])
    assert tree["metadata"] == {"every": 1}


def test_a_function_may_be_timed_and_stays_what_it_is():
    @timers.timed("double")
    def double(x):
        """Doubles."""
        return 2 * x

    assert double(1) == 2  # off
    timers.enable()
    assert [double(x) for x in range(3)] == [0, 2, 4]
    assert (double.__name__, double.__doc__) == ("double", "Doubles.")
    assert timers.snapshot()["children"]["double"]["count"] == 3


def test_a_recursive_function_is_its_own_child():
    @timers.timed("down")
    def down(n):
        return 0 if n == 0 else down(n - 1)

    timers.enable()
    down(2)
    level = timers.snapshot()
    counts = []
    while level["children"]:
        level = level["children"]["down"]
        counts.append(level["count"])
    assert counts == [1, 1, 1]


def test_a_block_that_raises_is_counted_and_leaves_the_path_in_order():
    timers.enable()
    with pytest.raises(ZeroDivisionError), timers.timed("outer"), timers.timed("inner"):
        _ = 1 / 0
    with timers.timed("after"):
        pass
    tree = timers.snapshot()["children"]
    assert list(tree) == ["outer", "after"]
    assert tree["outer"]["children"]["inner"]["count"] == 1


@pytest.mark.covers("U-B5", "G-17")
def test_sampling_measures_some_and_estimates_all():
    timers.enable(every=10)
    inner = timers.timed("inner")(lambda: None)
    for _ in range(100):
        with timers.timed("outer"):
            inner(), inner(), inner()
    own = timers._own.root.children["outer"]
    assert (own.count, own.children["inner"].count) == (10, 30)
    outer = timers.snapshot()["children"]["outer"]
    assert (outer["count"], outer["children"]["inner"]["count"]) == (100, 300)


@pytest.mark.covers("G-17")
def test_timers_that_are_off_leave_nothing():
    with timers.timed("outer"):
        timers.gauge("g", 1)
    timers.enable()
    timers.disable()
    with timers.timed("outer"):
        timers.gauge("g", 1)
    tree = timers.snapshot()
    assert (tree["children"], tree["gauges"]) == ({}, {})


def test_timers_turned_on_or_cleared_inside_a_block_do_no_harm():
    with timers.timed("off when it began"):
        timers.enable()
        with timers.timed("a"):
            timers.clear()
    with timers.timed("b"):
        timers.disable()
    assert timers.snapshot()["children"]["b"]["count"] == 1


def test_each_thread_has_a_tree_of_its_own():
    timers.enable()
    counts = []

    def work():
        with timers.timed("unseen"):  # timers of this thread are off
            pass
        timers.enable()
        with timers.timed("seen"):
            pass
        counts.append({name: child["count"] for name, child in timers.snapshot()["children"].items()})
        timers.disable()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert counts == [{"seen": 1}]
    assert timers.snapshot()["children"] == {}


def test_a_timer_wants_a_name_and_a_rate_is_a_whole_number():
    with pytest.raises(TypeError, match=r"write timed\('name'\)"):

        @timers.timed
        def function():
            pass

    with pytest.raises(ValueError, match=r"every=-1 must be"):
        timers.enable(-1)


@pytest.mark.covers("U-10/tree", "U-B5", "G-17")
def test_the_trees_of_all_workers_are_added_up_under_one_node(pool_of, where):
    pool = begun(pool_of(timed_envs(4), tuning={"timers_every": 1}, num_workers=2))
    for _ in range(5):
        pool.step([0] * 4)
    tree = stepmill.read_timers(pool)
    workers = tree["children"]["workers"]
    root = workers["children"]["worker_root"]
    assert workers["is_parallel"]
    assert root["is_parallel"]
    assert root["count"] == (1 if where == "serial" else 2)
    assert set(tree) >= {"name", "total", "count", "self", "children", "is_parallel", "gauges", "metadata"}
    envs = root["children"]["envs"]
    assert envs["count"] == 4 * 5 + 4
    physics = (tree if where == "serial" else envs)["children"]["physics"]
    assert (physics["count"], physics["children"]["solve"]["count"]) == (20, 40)
    assert physics["total"] >= physics["children"]["solve"]["total"] > 0
    gauge = tree["gauges"]["t"]
    assert (gauge["min"], gauge["max"], gauge["count"]) == (0.0, 34.0, 20)
    if where != "serial":
        assert gauge["value"] == (14 + 34) / 2  # the newest of each worker


def test_the_learners_own_timers_are_in_the_same_tree(pool_of):
    pool = pool_of(timed_envs(2))
    timers.enable()
    with timers.timed("learn"):
        pool.reset(seed=0)
    tree = stepmill.read_timers(pool)
    assert tree["children"]["learn"]["count"] == 1
    assert tree["metadata"]["num_workers"] == pool.num_workers


@pytest.mark.covers("G-17")
def test_workers_whose_timers_are_off_have_the_engines_counters_alone(pool_of):
    pool = begun(pool_of(timed_envs(2)))
    pool.step([0, 0])
    root = stepmill.read_timers(pool)["children"]["workers"]["children"]["worker_root"]
    assert root["children"]["envs"]["children"] == {}
    assert root["children"]["envs"]["count"] == 4
    assert set(root["children"]) == {"envs", "wait"}
