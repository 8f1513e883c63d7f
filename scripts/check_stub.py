"""Compare the committed stub of the extension with the built extension. With --write, rewrite the stub."""

import difflib
import subprocess
import sys
import tempfile
from pathlib import Path

STUB = Path(__file__).resolve().parent.parent / "src" / "stepmill" / "_native.pyi"


def make_stub() -> str:
    """Return the stub that nanobind generates for the built extension."""
    with tempfile.TemporaryDirectory() as folder:
        stub = Path(folder) / "_native.pyi"
        command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "stepmill._native", "-o", str(stub)]
        subprocess.run(command, check=True)
        return stub.read_text(encoding="utf-8")


def main() -> int:
    """Print the difference. The exit status is 1 if there is one."""
    built = make_stub()
    if "--write" in sys.argv[1:]:
        STUB.write_text(built, encoding="utf-8")
        print(f"stub: {STUB.name} written")
        return 0
    committed = STUB.read_text(encoding="utf-8") if STUB.exists() else ""
    if committed == built:
        print("stub: matches the extension")
        return 0
    lines = difflib.unified_diff(
        committed.splitlines(), built.splitlines(), f"committed {STUB.name}", "built extension", lineterm=""
    )
    print("\n".join(lines))
    print("stub: differs from the extension; run `make stub` and commit the result")
    return 1


if __name__ == "__main__":
    sys.exit(main())
