"""Checks of every test: it ends, and leaves no process, thread, descriptor or shared memory behind.

Tests run in this process; pools of the process backend start real workers. Envs that a worker must import by name are in
`stepmill.testing` or in `tests`, which is why the root of the repository is put on `sys.path`.
"""

# ruff: noqa: E402 - environment and path are set before anything else is imported
from __future__ import annotations

import os
import sys
from pathlib import Path

for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")  # before NumPy starts threads that would look like leaks
os.environ.setdefault("STEPMILL_LEAK_WARNINGS", "1")  # programs that leak native objects say so on stderr
sys.path.insert(0, str(Path(__file__).parents[1]))

import faulthandler
import gc
import signal
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import gymnasium  # noqa: F401 - loaded here, so that no test is the first to open its files
import hypothesis
import numpy as np  # noqa: F401
import pytest

from stepmill.backends import starter_client
from stepmill.testing.gates import Gate
from tests.harness import huge_pages, leaks
from tests.harness.covers import Covers
from tests.harness.effort import EXPLORES
from tests.harness.pools import keep_closed, make_pool, make_vector_env
from tests.harness.sanitizer import fork_at_rest

pytest_plugins = ["pytester"]
if sys.version_info >= (3, 15) and find_spec("pettingzoo") is None:  # it has no wheel yet
    collect_ignore = ["fuzz/test_programs.py"]
HANG_S = 400.0  # more than the timeout of pytest, which shows more
_REPORT = pytest.StashKey[pytest.TestReport]()

hypothesis.settings.register_profile(
    "stepmill",
    deadline=None,
    derandomize=not EXPLORES,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("stepmill")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--where", default="serial,thread,fork", help="backends of the tests that run on several")
    parser.addoption(
        "--node-kills", type=int, default=30, help="per round of tests/ray/test_ray_chaos.py, with -m soak"
    )
    parser.addoption("--covers", type=Path, metavar="FILE", help="write which ids of docs/coverage.toml were shown")


def pytest_configure(config: pytest.Config) -> None:
    # A shell's background job ignores Ctrl-C, and so would every program that a test starts and interrupts.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    config.addinivalue_line("markers", "orphans: kills parents of processes, whose zombies come to us")
    config.addinivalue_line("markers", "covers(*ids): shows these behaviours of docs/coverage.toml")
    if config.getoption("--covers"):
        config.pluginmanager.register(Covers(config.getoption("--covers")))
    starter_client.IDLE_S = 600.0  # minutes may pass between two tests that need one, and a new one imports its modules
    leaks.adopt_orphans()
    if "libasan" in os.environ.get("LD_PRELOAD", ""):
        fork_at_rest()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of context="spawn" as slow: each of its workers is a new interpreter. The contract is tried on it anyway."""
    for item in items:
        values = item.callspec.params.values() if hasattr(item, "callspec") else ()
        is_spawned = any(isinstance(value, str) and value == "spawn" for value in values)
        if is_spawned and item.path.parent.name in ("crash", "integration"):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    freeze_what_stays()
    huge_pages.collapse()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and item.path != nextitem.path:
        freeze_what_stays()


def pytest_unconfigure() -> None:
    # What a failed test has left would never be collected, and the native module would report all of it as leaked.
    gc.unfreeze()


def freeze_what_stays() -> None:
    """Leave tests and modules out of garbage collections: tests that collect garbage wait for them, and forks copy their pages."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_REPORT] = report
    return report


@pytest.fixture(autouse=True)
def leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a child, a thread, a descriptor or shared memory; dump all stacks if it hangs in native code."""
    # The watchdog is a thread, too: it starts before the first count, and ends after the last.
    faulthandler.dump_traceback_later(HANG_S, exit=True)
    if "ray_cluster" in request.fixturenames or request.config.getoption("--where") == "ray":
        yield from _leaves_no_workers()
        faulthandler.cancel_dump_traceback_later()
        return
    before = leaks.Footprint.take()
    yield
    report = request.node.stash.get(_REPORT, None)
    if report is not None and report.failed:
        leaks.kill_descendants()  # its traceback holds on to what it used: only the failure is worth a report
        faulthandler.cancel_dump_traceback_later()
        return
    left = leaks.find_leaks(before, reaps=request.node.get_closest_marker("orphans") is not None)
    if left:
        leaks.kill_descendants()
    faulthandler.cancel_dump_traceback_later()
    assert not left, "the test left behind:\n  " + "\n  ".join(left)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests that use the fixture `where` below on the backends of --where. A module may define a fixture of that name itself."""
    is_given = any("where" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "where" in metafunc.fixturenames and not is_given and not hasattr(metafunc.module, "where"):
        names = metafunc.config.getoption("--where").split(",")
        params = [pytest.param(name, marks=pytest.mark.ray) if name == "ray" else name for name in names]
        metafunc.parametrize("where", params, indirect=True)


@pytest.fixture
def where(request: pytest.FixtureRequest) -> str:
    """Name of a backend in `tests.harness.pools.BACKENDS`."""
    name: str = request.param
    if name == "ray":
        request.getfixturevalue("ray_cluster")
    return name


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """A Ray cluster of two machines on this one, to which the tests are connected."""
    from tests.harness.ray_cluster import running_cluster

    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def gate() -> Iterator[Gate]:
    with Gate() as opened:
        yield opened


@pytest.fixture
def pool_of(where: str) -> Iterator[Callable[..., Any]]:
    """Build pools on the backend under test; they are closed at the end."""
    yield from keep_closed(partial(make_pool, where))


@pytest.fixture
def vector_env_of(where: str) -> Iterator[Callable[..., Any]]:
    """Build vector envs on the backend under test; they are closed at the end."""
    yield from keep_closed(partial(make_vector_env, where))


def _leaves_no_workers() -> Iterator[None]:
    """Check that no worker is left. Ray keeps processes, threads and descriptors of its own."""
    before = set(leaks.workers_of_pools())
    yield
    left = leaks.wait_until_gone(
        [pid for pid in leaks.workers_of_pools() if pid not in before], timeout_s=leaks.GRACE_S
    )
    assert not left, f"the test left the workers {left} behind"
