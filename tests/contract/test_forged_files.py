"""Changed files of saved envs whose checksum is right: no code of them runs, nothing crashes, and no wait is without end."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import forged
from tests.harness.effort import examples


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", forged.KINDS)
def test_forged_files_run_no_code_and_leave_envs_that_can_be_reset(kind: str, tmp_path: Path) -> None:
    if kind == "kernel" and find_spec("numba") is None:
        pytest.skip("numba is missing")
    path = str(tmp_path / "envs")
    data, expected = forged.saved_file(kind, path)
    with forged.limit_is_kept():
        for number in range(examples(40)):
            Path(path).write_bytes(forged.forge(data, random.Random(number)))
            found = forged.judge(kind, path, expected, strict=number % 3 > 0)
            assert not found.startswith("WRONG"), (number, found)
