"""A reset is planned before anything is sent, and recorded once it was sent."""

from __future__ import annotations

import numpy as np
import pytest

import stepmill
from stepmill.pool.resets import ResetPlanner
from stepmill.testing import CountingEnv


def test_an_env_has_its_seed_only_when_the_plan_was_sent() -> None:
    planner = ResetPlanner(2, 1, is_seeded=True)
    refused = planner.plan(None, None, None, None)
    assert None not in refused.words

    again = planner.plan(None, None, None, None)
    assert None not in again.words

    planner.record_sent(again)
    assert planner.plan(None, None, None, None).words == [None, None]


@pytest.mark.parametrize(
    "mask", [np.ones(3, np.bool_), np.ones((2, 1), np.bool_), np.ones(2, np.int64), np.bool_(1), [True]]
)
def test_a_reset_mask_of_another_shape_or_dtype_is_refused_in_words(mask: object) -> None:
    with stepmill.Pool([CountingEnv] * 2, backend="serial") as pool:
        with pytest.raises(stepmill.UsageError, match="give 2 bools, one per row"):
            pool.reset_async(mask=mask)  # type: ignore[arg-type]
        assert pool.reset(seed=0).env_id.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        ("serial", {"step_timeout_s": 1.0}),
        ("serial", {"reset_timeout_s": 1.0, "workers": {"env": {"A": "b"}}}),
        ("serial", {"workers": {"threads": 2, "call_timeout_s": 1.0}, "start": {"timeout_s": 1.0}}),
        ("thread", {"workers": {"env": {"A": "b"}}}),
    ],
)
def test_options_without_effect_on_a_backend_are_named(backend: str, options: dict[str, object]) -> None:
    with pytest.warns(RuntimeWarning, match=f"no effect on the {backend} backend") as caught:
        stepmill.Pool([CountingEnv], backend=backend, options=stepmill.PoolOptions(**options)).close()  # type: ignore[arg-type]
    assert all(name in str(caught[0].message) for name in options)
    assert caught[0].filename == __file__
