"""Keywords of `make_vec` that are meant for the envs."""

from __future__ import annotations

import pytest

import stepmill


def test_a_keyword_that_is_like_no_option_gets_no_suggestion():
    with pytest.raises(stepmill.EnvError) as raised:
        stepmill.make_vec("CartPole-v1", 2, gravity=3, backend="serial")
    assert "did you mean" not in str(raised.value)
