"""Reports: read-only mappings that print as tables."""

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import jax

from optax_lossscale._support.tree import Leaf, PyTree

Entry = TypeVar("Entry")


class Report(Mapping[str, Entry]):
    """A read-only mapping. In subclasses, `repr` is a table, so that notebooks show it."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Entry:
        """Return the entry of this name."""
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._entries)

    def __len__(self) -> int:
        """Return the number of entries."""
        return len(self._entries)


def table_or_shapes(table: Callable[[], str], entries: Mapping[str, PyTree]) -> str:
    """Return the table, or the shapes of the entries if their values cannot be read."""
    try:
        return table()
    except Exception:  # noqa: BLE001 - a debugger may print traced, stacked or donated values
        lines = [f"{len(entries)} entries, whose values cannot be read:"]
        for name, entry in entries.items():
            lines.append(f"  {name}: {', '.join(map(_shape, jax.tree.leaves(entry)))}")
        return "\n".join(lines)


def _shape(leaf: Leaf) -> str:
    return f"{leaf.dtype}{[*leaf.shape]}" if hasattr(leaf, "dtype") else type(leaf).__name__
