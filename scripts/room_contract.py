"""A contract of import-linter: a package that is not listed imports of stepmill only what is allowed.

The contracts in pyproject.toml name packages, so without this one they say nothing about a package that is added.
"""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, fields, output


def is_in(module: str, package: str) -> bool:
    """Return whether a module is a package or one of its modules."""
    return module == package or module.startswith(f"{package}.")


class RoomContract(Contract):
    """Options: `known`, the modules below the root that have contracts of their own, and `allowed`, modules of the root.

    Import-linter reads the options into the attributes; only direct imports count.
    """

    type_name = "room"
    known: Any = fields.SetField(subfield=fields.StringField())
    allowed: Any = fields.SetField(subfield=fields.StringField())

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Look at each import of each new package."""
        root = self.session_options["root_packages"][0]
        rooms = sorted(graph.find_children(root) - self.known)
        wrong = [
            f"{module} imports {imported}"
            for room in rooms
            for module in sorted({room} | graph.find_descendants(room))
            for imported in sorted(graph.find_modules_directly_imported_by(module))
            if is_in(imported, root) and not is_in(imported, room) and imported not in self.allowed
        ]
        return ContractCheck(kept=not wrong, metadata={"wrong": wrong, "allowed": sorted(self.allowed)})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports that are not allowed."""
        for line in check.metadata["wrong"]:
            output.print_error(f"- {line}")
        output.print(f"A new package may import {', '.join(check.metadata['allowed'])} and its own modules.")
