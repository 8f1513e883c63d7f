"""Functions are sent to workers by their names exactly where cloudpickle does it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import cloudpickle
import pytest

from stepmill.worker import messages
from stepmill.worker.messages import dump, load


def of_this_module(env: object) -> object:
    return env


@pytest.fixture
def made_module() -> Iterator[Any]:
    module: Any = ModuleType("stepmill_made_module")
    exec("def f(env):\n    return env", vars(module))
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_a_function_of_a_module_is_sent_by_its_name_without_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "dumps", None)
    payload = of_this_module, (1,), {"key": 2}
    data = dump(payload)
    assert load(data) == payload
    assert data == cloudpickle.dumps(payload)


def test_a_function_of_a_module_that_is_registered_by_value_is_sent_by_value(made_module: Any) -> None:
    assert load(dump(made_module.f)) is made_module.f
    cloudpickle.register_pickle_by_value(made_module)
    try:
        assert load(dump(made_module.f)) is not made_module.f
    finally:
        cloudpickle.unregister_pickle_by_value(made_module)


def test_a_function_whose_name_belongs_to_another_one_now_is_sent_by_value(made_module: Any) -> None:
    old, made_module.f = made_module.f, len
    loaded: Any = load(dump((old, (), {})))
    assert loaded[0](7) == 7


def test_a_function_of_the_program_is_sent_by_value(monkeypatch: pytest.MonkeyPatch, made_module: Any) -> None:
    made_module.f.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "f", made_module.f, raising=False)
    assert load(dump(made_module.f)) is not made_module.f
