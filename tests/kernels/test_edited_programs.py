"""Generated programs: after any edit, also of a running program, a compiled kernel computes what the same text does as Python."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import stepmill

pytest.importorskip("numba")

import numba

from stepmill.kernels.code_digest import digest_of

NUM_MODULES = 3
# Where a function may have its number: lines before the function, of the lines in it, and the term.
PLACES = {
    "literal": ("", "", "{v}"),
    "global": ("G{i} = {v}", "", "G{i}"),
    "default": ("", "", "given"),
    "nested": ("G{i} = {v}", "    def inner(y):\n        return y + G{i}\n", "inner(0.0)"),
    "array in a tuple": ("T{i} = (1, (np.array([0.0] * 1200 + [{v}] + [0.0] * 1200), 2.0))", "", "T{i}[1][0][1200]"),
    "array": ("A{i} = np.array([[1.0, 2.0], [{v}, 3.0]], order='F')", "", "A{i}[1, 0]"),
    "record": ("R{i} = np.array([(1.0, {v})], [('a', 'f8'), ('b', 'f8')])", "", "R{i}[0]['b']"),
    "named tuple": ("P{i} = namedtuple('P', ['a', 'b'])(0.0, {v})", "", "P{i}.b"),
    "enum": ("class E{i}(enum.Enum):\n    A = 0.0\n    B = {v}", "", "E{i}.B.value"),
    "cell": ("", "", "cell"),
    "attribute": ("", "", "m2.H{i}"),
    "attribute of an attribute": ("", "", "m1.m2.H{i}"),
}
DECORATORS = ("", "@njit", "@njit(inline='always')", "@njit(cache=True)", "@njit(error_model='numpy')")


@dataclass(frozen=True)
class Function:
    """One function of a program. It calls the next one."""

    module: int
    place: str
    value: float
    decorator: str
    is_imported: bool  # the next function is reached by `from module import name`


Program = tuple[Function, ...]


def text_of(program: Program, module: int) -> str:
    lines = ["import enum", "from collections import namedtuple", "import numpy as np"]
    lines += [f"import stepmill_edited_m{later} as m{later}" for later in range(module + 1, NUM_MODULES)]
    if module == NUM_MODULES - 1:
        lines += [f"H{i} = {each.value}" for i, each in enumerate(program)]
    for i, each in reversed(list(enumerate(program))):
        if each.module != module:
            continue
        call = "0.0"
        if i + 1 < len(program):
            following, name = program[i + 1], f"F{i + 1}"
            if following.module == module or each.is_imported:
                call = f"{name}(x * 0.5)"
            else:
                call = f"m{following.module}.{name}(x * 0.5)"
            if following.module != module:
                lines.append(f"from stepmill_edited_m{following.module} import {name}")
        before, inside, term = (part.format(i=i, v=each.value) for part in PLACES[each.place])
        default = f", given={each.value}" if each.place == "default" else ""
        made = f"{each.decorator}\ndef F{i}(x{default}):\n{inside}    return x * 1.5 + {term} + {call}\n"
        if each.place == "cell":
            made = (
                f"def make{i}(cell):\n    "
                + made.replace("\n", "\n    ")
                + f"return F{i}\nF{i} = make{i}({each.value})"
            )
        lines += [before, made]
    return "\n".join(lines)


def load(program: Program, njit: Callable[..., Any], folder: Path) -> Callable[..., Any]:
    """Write the modules of a program, load them, and return its first function."""
    for module in reversed(range(NUM_MODULES)):
        name = f"stepmill_edited_m{module}"
        loaded = sys.modules[name] = types.ModuleType(name)
        loaded.__dict__["njit"] = njit
        loaded.__file__ = str(folder / f"{name}.py")
        Path(loaded.__file__).write_text(text_of(program, module))
        exec(compile(Path(loaded.__file__).read_text(), loaded.__file__, "exec"), loaded.__dict__)
    return sys.modules[f"stepmill_edited_m{program[0].module}"].__dict__["F0"]  # type: ignore[no-any-return]


def reload_in_place(program: Program) -> None:
    """Give the modules the globals of a program, as a user does who assigns to them; the functions stay."""
    for module in range(NUM_MODULES):
        name = f"stepmill_edited_m{module}"
        fresh = {"njit": no_njit}
        exec(text_of(program, module), fresh)
        vars(sys.modules[name]).update({key: value for key, value in fresh.items() if key[0] in "GTARPEH"})


def no_njit(*arguments: Any, **options: Any) -> Any:
    return arguments[0] if arguments else lambda function: function


def compiled_result(function: Callable[..., Any]) -> float:
    def reset(state: Any, rng: Any, obs: Any) -> None:
        obs[0] = 0.0

    def step(state: Any, action: Any, rng: Any, obs: Any) -> Any:
        return function(2.0), False, False

    make = stepmill.kernel(
        observation_space=spaces.Box(0, 1, (1,)), action_space=spaces.Discrete(2), state=[("x", "f8")]
    )
    env = make(type("Generated", (), {"reset": reset, "step": step}))()
    env.reset(seed=0)
    return float(env.step(0)[1])


def python_result(program: Program, folder: Path) -> float:
    kept = {name: sys.modules.get(name) for name in (f"stepmill_edited_m{module}" for module in range(NUM_MODULES))}
    result = float(load(program, no_njit, folder)(2.0))
    sys.modules.update({name: module for name, module in kept.items() if module is not None})
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    for module in range(NUM_MODULES):
        sys.modules.pop(f"stepmill_edited_m{module}", None)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    modules = sorted(draw(st.lists(st.integers(0, NUM_MODULES - 1), min_size=1, max_size=4)))
    made = []
    for module in modules:
        places = [place for place in PLACES if not place.startswith("attribute") or module == 0]
        number = draw(st.floats(-4, 4).map(lambda x: round(x, 3)))
        choices = draw(st.sampled_from(places)), number, draw(st.sampled_from(DECORATORS)), draw(st.booleans())
        made.append(Function(module, *choices))
    return tuple(made)


@pytest.mark.parametrize("place", PLACES)
def test_the_digest_changes_with_a_number_in_a_function_that_is_called(folder: Path, place: str) -> None:
    def digest_with(value: float) -> str:
        caller = Function(0, "literal", 1.0, decorator, is_imported)
        called = Function(0 if place.startswith("attribute") else 1, place, value, decorator, is_imported)
        return digest_of(load((caller, called), numba.njit, folder))

    for decorator, is_imported in itertools.product(DECORATORS, (False, True)):
        assert digest_with(1.0) == digest_with(1.0)
        assert digest_with(1.0) != digest_with(2.0), (decorator, is_imported)


@pytest.mark.slow
@settings(
    max_examples=10,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # each example takes seconds, so that shrinking takes minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(programs(), st.data())
def test_a_compiled_kernel_computes_what_its_text_says_after_each_edit(
    folder: Path, program: Program, data: st.DataObject
) -> None:
    assert compiled_result(load(program, numba.njit, folder)) == pytest.approx(python_result(program, folder))
    edited_at = data.draw(st.integers(0, len(program) - 1), "the function that is edited")
    changed = replace(program[edited_at], value=program[edited_at].value + 1.0)
    edited = (*program[:edited_at], changed, *program[edited_at + 1 :])
    wanted = python_result(edited, folder)
    if changed.place not in ("literal", "default", "cell"):
        first = sys.modules[f"stepmill_edited_m{program[0].module}"].__dict__["F0"]
        reload_in_place(edited)
        assert compiled_result(first) == pytest.approx(wanted)
    assert compiled_result(load(edited, numba.njit, folder)) == pytest.approx(wanted)
