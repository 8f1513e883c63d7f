"""The examples of the API reference that need libraries which `.venv` does not have."""

from __future__ import annotations

import pytest

from tests.frontends.guides import run_guide


@pytest.mark.slow
def test_the_examples_that_need_other_libraries_run(tmp_path):
    for library in ("envpool", "stable_baselines3", "tianshou", "torchrl"):
        pytest.importorskip(library)
    run_guide("../api_examples", tmp_path, ignored=".*precision lowered by casting")
