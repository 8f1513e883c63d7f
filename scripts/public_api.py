"""Compare the public names with tests/unit/public_api.txt: `public_api.py`, or `public_api.py --write` after a change.

The file has one line for each public class, function and module: its name and those of its members, each with a checksum of its
signature. Griffe reads them from the sources, so no optional library is needed. `--write` refuses names that were added, changed or
removed unless the newest section of CHANGELOG.md names them.
"""

from __future__ import annotations

import argparse
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import griffe

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src"
SNAPSHOT = ROOT / "tests" / "unit" / "public_api.txt"
CHANGELOG = ROOT / "CHANGELOG.md"
# The modules from which users import. Their public names are these, or if none are given those of __all__, or all that they
# define without an underscore.
MODULES: Mapping[str, tuple[str, ...]] = {
    "stepmill": (),
    "stepmill.kernels": (),
    "stepmill.timers": (),
    "stepmill.torch": (),
    "stepmill.jax": (),
    "stepmill.testing": (),
    "stepmill.envs.atari_vector": ("AtariVectorTask",),
    "stepmill.envs.envpool": ("EnvPoolTask", "GivenEnvPool"),
    "stepmill.envs.pettingzoo": ("StackedAgents",),
    "stepmill.envs.ragged": ("RaggedEnv",),
    "stepmill.backends.base": ("Backend", "Future", "MonitoredBackend", "TracedBackend"),
    "stepmill.frontends.alf": (),
    "stepmill.frontends.di_engine": (),
    "stepmill.frontends.dm_env": (),
    "stepmill.frontends.gymnasium": (),
    "stepmill.frontends.mlagents": (),
    "stepmill.frontends.multi_env": (),
    "stepmill.frontends.pettingzoo": (),
    "stepmill.frontends.ray_rollout": ("Fragment", "RayRollout"),
    "stepmill.frontends.sb3": (),
    "stepmill.frontends.tianshou": (),
    "stepmill.frontends.torchrl": (),
}


@dataclass(frozen=True)
class PublicName:
    """One public name: where users import it, and what defines it."""

    module: str
    name: str
    definition: griffe.Object

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@cache
def sources() -> griffe.ModulesCollection:
    """Read the sources of all modules."""
    loader = griffe.GriffeLoader(search_paths=[SRC], allow_inspection=False)
    loader.load("stepmill")
    return loader.modules_collection


def public_names(module: str) -> list[str]:
    """Return the names that users may import from a module, sorted."""
    found = sources()[module]
    listed = MODULES.get(module) or found.exports
    if "lazy_names" in found.members:  # the package loads what it imports for type checkers on first use
        listed = [
            name for name, path in found.imports.items() if path.startswith("stepmill.") and _is_lazy(found[name])
        ]
    if not listed:
        listed = [name for name, each in found.members.items() if isinstance(each, (griffe.Class, griffe.Function))]
    return sorted(name for name in map(str, listed) if not name.startswith("_"))


def _is_lazy(member: griffe.Object | griffe.Alias) -> bool:
    return member.is_module or not member.runtime


def all_names() -> Iterator[PublicName]:
    """Yield every public name of every public module."""
    for module in MODULES:
        for name in public_names(module):
            found = sources()[f"{module}.{name}"]
            yield PublicName(module, name, found.final_target if found.is_alias else found)


def _shape(found: griffe.Object | griffe.Alias) -> str:
    """Return the signature of a function, the bases of a class, or the type and the value of another name."""
    if isinstance(found, griffe.Alias):  # an inherited member
        found = found.final_target
    if isinstance(found, griffe.Class):
        return ", ".join(map(str, found.bases))
    if isinstance(found, griffe.Function):
        return str(found.signature())
    if not isinstance(found, griffe.Attribute):  # a module
        return ""
    is_constant = not found.labels & {"property", "instance-attribute"}
    return f"{found.annotation} = {found.value if is_constant else ''}"


def describe(public: PublicName) -> str:
    """Return the line of one public name: itself and the members of a class, each with a checksum of its signature."""
    found = public.definition
    members = found.all_members if isinstance(found, griffe.Class) else {}
    shapes = {name: _shape(each) for name, each in members.items() if not name.startswith("_") or name == "__init__"}
    lines = [(public.path, _shape(found)), *sorted(shapes.items())]
    return " ".join(f"{name}:{zlib.crc32(shape.encode()):08x}" for name, shape in lines)


def current() -> str:
    """Return the text that the snapshot should have."""
    return "".join(f"{describe(public)}\n" for public in all_names())


def undocumented() -> list[str]:
    """Return the public classes and functions without a docstring."""
    kinds = griffe.Class, griffe.Function
    names = (public for public in all_names() if isinstance(public.definition, kinds))
    return [public.path for public in names if not public.definition.has_docstring]


def changed_names(before: str, after: str) -> list[str]:
    """Return the names whose signatures differ: `Pool`, or `Pool.recv` for a member."""
    old, new = _checksums(before), _checksums(after)
    return sorted(name for name in {*old, *new} if old.get(name) != new.get(name))


def _checksums(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        (owner, own), *inner = (word.split(":") for word in line.split())
        found |= {owner: own, **{f"{owner}.{name}": checksum for name, checksum in inner}}
    return found


def missing_from_changelog(names: Sequence[str], changelog: str) -> list[str]:
    """Return the names of which the newest section of a changelog mentions neither themselves, nor their class or module."""
    section = re.split(r"^## ", changelog, flags=re.MULTILINE)[1]
    words = set(re.findall(r"\w+", section))
    return [name for name in names if not words & set(name.split(".")[-3:]) - {"stepmill", "frontends", "envs"}]


def main() -> int:
    """Compare or write the snapshot. The exit status is 1 if it is out of date."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", action="store_true", help="write the snapshot; CHANGELOG.md must name what has changed"
    )
    options = parser.parse_args()
    before, after = SNAPSHOT.read_text(encoding="utf-8") if SNAPSHOT.exists() else "", current()
    changed = changed_names(before, after)
    if not options.write:
        if before != after:
            print(f"the public API has changed: {', '.join(changed)}")
            print("describe it in CHANGELOG.md, then run: python scripts/public_api.py --write")
        return int(before != after)
    missing = missing_from_changelog(changed, CHANGELOG.read_text(encoding="utf-8")) if before else []
    if missing:
        print(f"the newest section of CHANGELOG.md does not name: {', '.join(missing)}")
        return 1
    SNAPSHOT.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
