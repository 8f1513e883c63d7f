"""Compare the public names with tests/unit/public_api.txt: `public_api.py`, or `public_api.py --write` after a change.

The file has one line for each public class, function and module: its name and those of its members, each with a checksum of its
signature, which the sources show. They are read without an import, so no optional library is needed. `--write` refuses names that were added, changed or
removed unless the newest section of CHANGELOG.md names them.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

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
Definition = ast.ClassDef | ast.FunctionDef | ast.Assign | ast.AnnAssign


@dataclass(frozen=True)
class PublicName:
    """One public name: where users import it, and what defines it. `node` is None for a module."""

    module: str
    name: str
    home: str
    node: Definition | None

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


@cache
def parse(module: str) -> ast.Module:
    """Parse the source of a module."""
    return ast.parse(_file_of(module).read_text(encoding="utf-8"))


def _file_of(module: str) -> Path:
    path = SRC.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _statements(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield the statements of a module, also those under a condition such as TYPE_CHECKING."""
    for statement in tree.body:
        if isinstance(statement, (ast.If, ast.Try)):
            yield from statement.body
            yield from statement.orelse
        else:
            yield statement


def _names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _constant(tree: ast.Module, name: str) -> object:
    """Return the value of a literal that a module assigns to a name, or None."""
    for statement in tree.body:
        if name in _names_of(statement) and isinstance(statement, (ast.Assign, ast.AnnAssign)) and statement.value:
            try:
                return ast.literal_eval(statement.value)
            except ValueError:
                return None
    return None


def public_names(module: str) -> list[str]:
    """Return the names that users may import from a module, sorted."""
    tree = parse(module)
    listed = MODULES.get(module) or _constant(tree, "__all__") or _reexported(tree)
    if not listed:
        defined = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
        listed = [name for name in defined if not name.startswith("_")]
    return sorted(str(name) for name in cast("Sequence[object]", listed) if name != "__version__")


def _reexported(tree: ast.Module) -> list[str]:
    """Return the names that a module imports as themselves, `import X as X`, which says that they are public."""
    imports = [statement for statement in _statements(tree) if isinstance(statement, ast.ImportFrom)]
    return [alias.name for statement in imports for alias in statement.names if alias.asname == alias.name]


def find_definition(module: str, name: str) -> tuple[str, Definition | None]:
    """Return the module that defines a name, and its definition. Follows imports.

    Raises:
        LookupError: the module has no such name.
    """
    tree = parse(module)
    for statement in _statements(tree):
        if name in _names_of(statement) and isinstance(statement, Definition):
            return module, statement
    imports = [statement for statement in _statements(tree) if isinstance(statement, ast.ImportFrom)]
    for source, alias in ((statement.module or "", alias) for statement in imports for alias in statement.names):
        if (alias.asname or alias.name) == name and source.startswith("stepmill"):
            is_module = source == module  # `from stepmill import testing` in stepmill itself
            return (f"{module}.{name}", None) if is_module else find_definition(source, alias.name)
    raise LookupError(f"{module} has no {name}")


def all_names() -> Iterator[PublicName]:
    """Yield every public name of every public module."""
    for module in MODULES:
        for name in public_names(module):
            yield PublicName(module, name, *find_definition(module, name))


def _signature(node: ast.FunctionDef) -> str:
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({ast.unparse(node.args)}){returned}"


def _is_property(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)


def _is_setter(node: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(decorator).endswith((".setter", ".deleter", "overload")) for decorator in node.decorator_list
    )


def members(home: str, node: ast.ClassDef) -> Mapping[str, str]:
    """Return the public members of a class, and of its bases in stepmill: name to signature, type or value."""
    found: dict[str, str] = {}
    for base in node.bases:
        name = ast.unparse(base).partition("[")[0]
        try:
            base_home, base_node = find_definition(home, name)
        except LookupError:
            continue
        if isinstance(base_node, ast.ClassDef):
            found.update(members(base_home, base_node))
    for statement in node.body:
        names = [name for name in _names_of(statement) if not name.startswith("_") or name == "__init__"]
        shape = _member_shape(statement) if names else None
        if shape is not None:
            found.update(dict.fromkeys(names, shape))
    return found


def _member_shape(statement: ast.stmt) -> str | None:
    """Return the signature, type or value of a member; None for setters and overloads."""
    if isinstance(statement, ast.FunctionDef):
        shape = _signature(statement)
        return None if _is_setter(statement) else shape.partition(" -> ")[2] if _is_property(statement) else shape
    if isinstance(statement, ast.AnnAssign):
        return f"{ast.unparse(statement.annotation)} = {ast.unparse(statement.value) if statement.value else ''}"
    return ast.unparse(statement.value) if isinstance(statement, ast.Assign) else None


def describe(public: PublicName) -> str:
    """Return the line of one public name: itself and the members of a class, each with a checksum of its signature."""
    node = public.node
    own, inner = "", dict[str, str]()
    if isinstance(node, ast.ClassDef):
        own, inner = ", ".join(ast.unparse(base) for base in node.bases), dict(members(public.home, node))
    elif isinstance(node, ast.FunctionDef):
        own = _signature(node)
    elif node is not None and node.value is not None:
        own = ast.unparse(node.value)
    shapes = [(public.path, own), *sorted(inner.items())]
    return " ".join(f"{name}:{zlib.crc32(shape.encode()):08x}" for name, shape in shapes)


def current() -> str:
    """Return the text that the snapshot should have."""
    return "".join(f"{describe(public)}\n" for public in all_names())


def undocumented() -> list[str]:
    """Return the public classes and functions without a docstring."""
    return [
        public.path
        for public in all_names()
        if isinstance(public.node, (ast.ClassDef, ast.FunctionDef)) and not ast.get_docstring(public.node)
    ]


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
