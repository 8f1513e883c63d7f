"""The cache of compiled kernels: code is used again if nothing that it depends on has changed, and only if nobody else can write it."""

from __future__ import annotations

import collections
import errno
import hashlib
import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

import stepmill

pytest.importorskip("numba")

import numba

from stepmill.kernels.code_digest import NotComparableError, digest_of


def reset(state: Any, rng: Any, obs: Any) -> None:
    obs[0] = 0.0


def kernel_of(step: Callable[..., Any]) -> Any:
    box = spaces.Box(-np.inf, np.inf, (1,), np.float32)
    make = stepmill.kernel(observation_space=box, action_space=spaces.Discrete(2), state=np.dtype([("x", "f8")]))
    return make(type("Edited", (), {"reset": reset, "step": step}))


def reward_of(step: Callable[..., Any]) -> float:
    """The reward that the compiled kernel gives, from the cache if there is something in it."""
    env = kernel_of(step)()
    env.reset(seed=0)
    return float(env.step(0)[1])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_options_and_lines_of_a_function_are_in_its_digest_and_lines_may_be_left_out() -> None:
    def half(x: float) -> float:
        return x / 2.0

    digests = {digest_of(numba.njit(error_model=model)(half)) for model in ("numpy", "python", "numpy")}
    assert len(digests) == 2
    before = digest_of(half), digest_of(half, has_lines=False)
    half.__code__ = half.__code__.replace(co_firstlineno=half.__code__.co_firstlineno + 1)
    assert digest_of(half) != before[0]
    assert digest_of(half, has_lines=False) == before[1]


def test_code_that_was_compiled_before_an_edit_of_a_module_does_not_run_after_it(folder: Path) -> None:
    physics = types.ModuleType("physics")

    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return physics.GAIN, False, False  # type: ignore[attr-defined]

    for gain in (1.0, 7.0):
        physics.GAIN = gain  # type: ignore[attr-defined]
        assert reward_of(step) == gain
    assert len(list(folder.glob("*/entry.py"))) == 2


def test_defaults_arrays_in_tuples_sets_and_types_are_in_the_digest() -> None:
    def with_keyword(default: object) -> Callable[..., Any]:
        def call(x: float, *, factor: object = default) -> object:
            return x, factor

        return call

    large = np.zeros(5000)
    edited = large.copy()
    edited[2500] = 1.0
    pairs = [(1.0, 2.0), (1, True), ((large,), (edited,)), ({"b", "a"}, {"b", "c"}), (np.float32, np.float64)]
    pairs += [({"a": 1}, {"a": 2}), (np.int64(1), np.int32(1)), (len, max), (numba.float32, numba.float64), ([1], (1,))]
    pairs += [(slice(1, 9), slice(1, 8))]  # constants since Python 3.14
    for first, second in pairs:
        assert digest_of(with_keyword(first)) == digest_of(with_keyword(first))
        assert digest_of(with_keyword(first)) != digest_of(with_keyword(second))


def intrinsic_of(constant: float, *, prefer_literal: bool = False) -> Any:
    @numba.extending.intrinsic(prefer_literal=prefer_literal)  # type: ignore[untyped-decorator]
    def twice(typing_context: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.fmul(arguments[0], context.get_constant(numba.float64, constant))

        return numba.float64(numba.float64), generate

    return twice


def test_intrinsics_are_compared_by_their_code() -> None:
    first = digest_of(intrinsic_of(1.0))
    assert first == digest_of(intrinsic_of(1.0))
    assert first != digest_of(intrinsic_of(2.0))
    assert first != digest_of(intrinsic_of(1.0, prefer_literal=True))


def test_signatures_fields_and_defaults_of_named_tuples_are_in_the_digest() -> None:
    def scaled(x: float) -> float:
        return x * 0.1

    assert digest_of(numba.njit("f8(f8)")(scaled)) == digest_of(numba.njit("f8(f8)")(scaled))
    assert digest_of(numba.njit("f8(f8)")(scaled)) != digest_of(numba.njit("f4(f4)")(scaled))
    make: Any = collections.namedtuple  # noqa: PYI024  their fields are data here
    assert digest_of(make("P", ["a", "b"])(1, 2)) != digest_of(make("P", ["b", "a"])(1, 2))
    assert digest_of(make("P", ["a"], defaults=[1.0])) != digest_of(make("P", ["a"], defaults=[2.0]))


def even(x: float) -> Any:
    return x if x < 1 else odd(x - 1)


def odd(x: float) -> Any:
    return x if x < 1 else even(x - 1)


def overloaded(x: float) -> float:
    return x


def test_code_that_numba_finds_by_types_or_computed_names_or_caches_wrongly_is_not_cached() -> None:
    @numba.extending.overload(overloaded)  # type: ignore[untyped-decorator]
    def implement(x: Any) -> Callable[..., Any]:
        return lambda x: x * 2.0

    with pytest.raises(NotComparableError, match="an overload of overloaded"):
        digest_of(lambda x: overloaded(x))
    numba.extending.overload(np.busday_count)(implement)
    with pytest.raises(NotComparableError, match="an overload of busday_count"):
        digest_of(lambda x: np.busday_count(x, x))
    with pytest.raises(NotComparableError, match="getattr, which takes names"):
        digest_of(lambda x: getattr(np, "pi"))  # noqa: B009
    with pytest.raises(NotComparableError, match="call each other in a circle"):
        digest_of(even)  # Numba's cache of such functions makes the next process crash


CALLEES = """
from collections import namedtuple
import numba
GAIN = 1.0

@numba.extending.register_jitable
def jitable(x):
    return x * GAIN

@numba.njit
def pull(x):
    return x * GAIN

@numba.njit
def with_default(x, pull=pull):
    return pull(x)

@numba.extending.intrinsic
def scaled(context, x):
    gain = GAIN

    def generate(context, builder, signature, arguments):
        return builder.fmul(arguments[0], context.get_constant(numba.float64, gain))

    return numba.float64(numba.float64), generate

TOOLS = namedtuple("Tools", ["pull", "weight"])(pull, 1.0)
"""


def test_a_global_that_is_assigned_again_is_seen_by_each_kind_of_function_that_a_kernel_calls(folder: Path) -> None:
    physics = types.ModuleType("physics")
    exec(CALLEES, physics.__dict__)
    jitable, with_default, scaled, tools = physics.jitable, physics.with_default, physics.scaled, physics.TOOLS

    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return jitable(1.0) + 10.0 * tools.pull(1.0) + 100.0 * with_default(1.0) + 1000.0 * scaled(1.0), False, False

    for gain in (1.0, 7.0):
        vars(physics)["GAIN"] = gain
        assert reward_of(step) == 1111.0 * gain


def test_the_options_of_register_jitable_are_in_the_digest() -> None:
    def with_options(**options: Any) -> Any:
        @numba.extending.register_jitable(**options)  # type: ignore[untyped-decorator]
        def half(x: float) -> float:
            return x / 2.0

        return half

    assert digest_of(with_options(fastmath=True)) == digest_of(with_options(fastmath=True))
    assert digest_of(with_options(fastmath=True)) != digest_of(with_options(fastmath=False))


@pytest.mark.slow
def test_the_digest_of_each_kernel_that_ships_with_stepmill_is_known() -> None:
    pytest.importorskip("mujoco")
    for name in stepmill.kernels.names():
        kernel = stepmill.kernels.find(name)
        assert len(digest_of(kernel.reset, kernel.step)) == 32, name


def test_a_kernel_that_uses_what_cannot_be_compared_is_compiled_in_each_process_and_says_so(folder: Path) -> None:
    class Unknown:
        """Numba cannot compile it; the branch that would use it is not compiled either."""

    unknown, is_used = Unknown(), False

    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        if is_used:
            print(unknown)
        return 1.0, False, False

    with pytest.raises(NotComparableError, match=r"unknown, a .*Unknown"):
        digest_of(step)
    with pytest.warns(UserWarning, match=r"kernel Edited.* in each process, because it holds unknown, a .*Unknown"):
        assert reward_of(step) == 1.0
    assert not folder.exists()


def plain(state: Any, action: Any, rng: Any, obs: Any) -> Any:
    return 1.0, False, False


def test_processes_with_equal_pids_that_share_a_cache_do_not_delete_each_others_files(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link

    def link_after_the_other_process(*paths: Any) -> None:
        monkeypatch.setattr(os, "link", link)
        assert reward_of(plain) == 1.0
        link(*paths)

    monkeypatch.setattr(os, "link", link_after_the_other_process)
    assert reward_of(plain) == 1.0
    assert [path.name for path in folder.glob("*/entry.py*")] == ["entry.py"]


@pytest.mark.parametrize("damage", ["flipped", "no checksum"])
def test_compiled_code_that_is_damaged_is_compiled_again(folder: Path, damage: str) -> None:
    assert reward_of(plain) == 1.0
    codes = sorted(folder.rglob("*.nbc"))
    assert codes
    damaged = set()
    for code in codes:
        data = bytearray(code.read_bytes())
        data[len(data) // 2] ^= 0xFF
        damaged.add(bytes(data))
        code.write_bytes(data)
        if damage == "no checksum":
            code.with_suffix(".sha256").unlink()
    assert reward_of(plain) == 1.0
    found = sorted(folder.rglob("*.nbc"))
    assert found
    assert not damaged & {code.read_bytes() for code in found}
    for code in found:
        assert code.with_suffix(".sha256").read_text() == hashlib.sha256(code.read_bytes()).hexdigest()


def test_a_kernel_is_compiled_without_a_cache_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*paths: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", fail)
    assert reward_of(plain) == 1.0
    assert not [path for path in folder.rglob("*") if path.is_file()]


def refused(folder: Path, match: str) -> None:
    with pytest.warns(RuntimeWarning, match=match):
        reward_of(plain)
    reward_of(plain)  # warns once: a second warning is an error here
    assert not list(folder.rglob("*.nbc"))


def test_a_cache_that_others_can_write_is_not_used_and_there_is_one_warning(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    refused(folder, r"without the cache .* because others can write .*chmod go-w")


@pytest.mark.slow
def test_a_cache_whose_files_others_can_write_or_have_linked_is_not_used(folder: Path) -> None:
    reward_of(plain)
    index = next(folder.rglob("*.nbi"))
    index.parent.chmod(0o755)
    index.chmod(0o666)
    with pytest.warns(RuntimeWarning, match=f"others can write .*{index.name}"):
        reward_of(plain)
    index.parent.chmod(0o700)
    index.rename(folder / "elsewhere")
    index.symlink_to(folder / "elsewhere")
    with pytest.warns(RuntimeWarning, match=f"{index.name} is a link"):
        reward_of(plain)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_cache_that_belongs_to_another_user_is_not_used(folder: Path) -> None:
    folder.mkdir(0o700)
    os.chown(folder, 12345, 12345)
    refused(folder, "belongs to user 12345")


@pytest.mark.slow
def test_a_cache_in_a_folder_as_tmp_is_used_since_nobody_can_rename_what_is_in_it(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o1777)
    reward_of(plain)
    assert list(folder.rglob("*.nbc"))
