"""The size check finds what is too large and nothing else."""

import importlib.util
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "scripts" / "check_sizes.py"


def test_what_is_too_large_is_named_with_its_size_and_nothing_else(tmp_path):
    spec = importlib.util.spec_from_file_location("check_sizes", SCRIPT)
    check_sizes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(check_sizes)
    path = tmp_path / "large.py"
    path.write_text("def small():\n    pass\ndef large():\n" + "    pass\n" * 500)
    num_lines = len(path.read_text().splitlines())
    found = {(excess.what, excess.size) for excess in check_sizes.check_file(path)}
    assert found == {("file length", num_lines), ("length of large()", 501)}
