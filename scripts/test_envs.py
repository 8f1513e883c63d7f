"""Compare envs of other packages in stepmill with the same envs in Gymnasium or alone, in .venvs/envs, and write docs/env_packages.md.

Usage: test_envs.py [PACKAGE ...]. tests/env_packages/packages.toml lists the packages and their envs. Each env runs in a process of its
own, and `stepmill doctor` checks it. The results are in build/envs; the page has the last result of each env. The exit status is 1
if an env differs, or two runs of the reference do, and packages.toml gives no reason. A package that cannot be imported is reported.
"""

import datetime as dt
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import tomllib
from side_env import make_side_env

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ROOT / "tests" / "env_packages" / "packages.toml"
RESULTS = ROOT / "build" / "envs"
PAGE = ROOT / "docs" / "env_packages.md"
BEGIN, END = "<!-- envs:begin -->", "<!-- envs:end -->"
LIMIT_S = 400
DOCTOR_STEPS = 500
BACKENDS = ("serial", "thread", "process")
HEADLESS = {
    "SDL_VIDEODRIVER": "dummy",
    "SDL_AUDIODRIVER": "dummy",
    "MUJOCO_GL": "egl",
    "PYTHONWARNINGS": "ignore",
    "PYTHONPATH": str(ROOT),
}


def make_env(listed: dict[str, Any]) -> Path:
    """Make .venvs/envs, install what is listed, and return its Python. What cannot be installed is left out, with pip's message."""
    folder = ROOT / ".venvs" / "envs"
    python = make_side_env(folder, editable=True)
    groups = [listed["requirements"], listed["without_dependencies"]]
    note, wanted = folder / "packages", json.dumps(groups)
    if note.exists() and note.read_text(encoding="utf-8") == wanted:
        return python
    is_whole = True
    for packages, flags in zip(groups, ([], ["--no-deps"]), strict=True):
        if not _pip(python, [*flags, *packages]):
            installed = [_pip(python, [*flags, package]) for package in packages]
            is_whole = is_whole and all(installed)
    if is_whole:
        note.write_text(wanted, encoding="utf-8")
    return python


def _pip(python: Path, arguments: list[str]) -> bool:
    environment = {key: value for key, value in os.environ.items() if key != "PIP_CONSTRAINT"}
    command = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, env=environment, check=False).returncode == 0


def run_env(python: Path, env: dict[str, Any]) -> dict[str, Any]:
    """Compare and measure an env, and let doctor check it."""
    arguments = [env["id"], *([env["api"]] if "api" in env else []), "--steps", str(env.get("steps", 500))]
    arguments += ["--ignore-info", env.get("ignore_info", "")]
    code, output, errors = _run([str(python), "-m", "tests.env_packages.run", *arguments])
    if code:
        last = (errors.strip().splitlines() or ["no message"])[-1]
        return {"error": f"the run ended with status {code}: {last}"}
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    if "missing" in result:
        return result
    command = [str(python), "-m", "stepmill", "doctor", env["id"], "--json", "--steps", str(DOCTOR_STEPS)]
    code, output, errors = _run(command)
    try:
        findings = json.loads(output)["findings"]
    except ValueError:
        findings = [{"check": "no output", "severity": "error", "what": errors.strip()[-200:]}]
    return {**result, "doctor": {"status": code, "findings": findings}}


def _run(command: list[str]) -> tuple[int, str, str]:
    with subprocess.Popen(
        command,
        cwd=RESULTS,  # ViZDoom writes its settings there
        env={**os.environ, **HEADLESS},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as child:
        try:
            output, errors = child.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # with the processes of its vector envs
            return 124, "", f"it ran longer than {LIMIT_S} s"
    return child.returncode, output, errors


def find_faults(env: dict[str, Any], result: dict[str, Any]) -> list[str]:
    """Return what is wrong and not listed."""
    if "missing" in result:
        return []
    if "error" in result:
        return [result["error"]]
    if result["unsteady"] is not None:
        return [] if "unsteady" in env else [f"two runs of the reference differ: {result['unsteady']}"]
    wrong = [f"{backend}: {where}" for backend, where in result["differs"].items() if where is not None]
    return [] if "differs" in env or "unsteady" in env else wrong


def row_of(package: dict[str, Any], env: dict[str, Any]) -> str:
    """Return the line of an env in the table."""
    result = read_result(env)
    name = env["id"].rpartition(":")[2]
    if result is None or "missing" in result or "error" in result:
        state = "not run" if result is None else result.get("missing") or result["error"]
        return f"| {package['name']} | `{name}` | {state.replace('|', ' ')} | | | | | | |"
    steady = result["unsteady"] is None and "unsteady" not in env
    cells = [("equal" if result["differs"][each] is None else "**differs**") if steady else "-" for each in BACKENDS]
    speed, doctor = result["speed"], result["doctor"]
    checks = ", ".join(finding["check"] for finding in doctor["findings"]) or "nothing found"
    rates = [f"{speed[key]:,.0f}" for key in ("stepmill", "peer")] if "error" not in speed else ["-", speed["error"]]
    peer = f"{rates[1]} ({speed['name']})" if "name" in speed else rates[1]
    version = f"{package['name']} {result['version']}"
    return f"| {version} | `{name}` | {' | '.join(cells)} | {doctor['status']}: {checks} | {rates[0]} | {peer} |"


def notes_of(env: dict[str, Any]) -> list[str]:
    """Return a line for each reason that is listed, and for each finding of doctor."""
    name, result = env["id"].rpartition(":")[2], read_result(env) or {}
    lines = [f"- `{name}`: {env[key]}" for key in ("unsteady", "differs") if key in env]
    lines += (
        [f"- `{name}`: `info[{env['ignore_info']!r}]` is not compared: the env draws it unseeded"]
        if "ignore_info" in env
        else []
    )
    lines += [f"- `{name}`: it is slow, and makes {env['steps']} steps per env"] if "steps" in env else []
    findings = result.get("doctor", {}).get("findings", [])
    return lines + [f"- `{name}`, {each['severity']} {each['check']}: {each['what'][:160]}" for each in findings]


def read_result(env: dict[str, Any]) -> dict[str, Any] | None:
    """Return the last result of an env; None if there is none."""
    file = RESULTS / f"{env['id'].replace('/', '_')}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def write_page(packages: list[dict[str, Any]]) -> None:
    """Write the tables into the page, and print them."""
    pairs = [(package, env) for package in packages for env in package["envs"]]
    lines = [
        f"Written on {dt.datetime.now(dt.timezone.utc):%Y-%m-%d}.",
        "",
        f"| package | env | {' | '.join(BACKENDS)} | `stepmill doctor`: exit status, findings | stepmill, steps/s | beside it, steps/s |",
        "|---|---|---|---|---|---|---|---|",
        *(row_of(package, env) for package, env in pairs),
        "",
        *(line for _, env in pairs for line in notes_of(env)),
    ]
    print("\n".join(lines))
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text("\n".join([f"{before}{BEGIN}", *lines, f"{END}{rest.partition(END)[2]}"]), encoding="utf-8")


def main() -> int:
    """Run all packages, or those that the arguments name."""
    listed = tomllib.loads(PACKAGES.read_text(encoding="utf-8"))
    packages: list[dict[str, Any]] = listed["package"]
    python = make_env(listed)
    RESULTS.mkdir(parents=True, exist_ok=True)
    faults = []
    for package in packages:
        if sys.argv[1:] and package["name"] not in sys.argv[1:]:
            continue
        code = f"from importlib.metadata import version; print(version({package['distribution']!r}))"
        version = _run([str(python), "-c", code])[1].strip()
        for env in package["envs"]:
            result = {"version": version, **run_env(python, env)}
            (RESULTS / f"{env['id'].replace('/', '_')}.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
            found = find_faults(env, result)
            print(f"envs: {env['id']}: {'; '.join(found) or result.get('missing') or 'as listed'}", flush=True)
            faults += found
    write_page(packages)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
