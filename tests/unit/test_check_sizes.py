"""The size check finds what is too large and nothing else."""

from scripts import check_sizes


def test_what_is_too_large_is_named_with_its_size_and_nothing_else(tmp_path):
    path = tmp_path / "large.py"
    path.write_text("def small():\n    pass\ndef large():\n" + "    pass\n" * 500)
    num_lines = len(path.read_text().splitlines())
    found = {(excess.what, excess.size) for excess in check_sizes.check_file(path)}
    assert found == {("file length", num_lines), ("length of large()", 501)}
