"""Draw the rooms of the package, its top-level modules and packages: `python tools/rooms.py`.

An arrow leads from each room to the rooms that it imports, behind the boxes. Arrows that follow
from others are left out.
"""

import ast
import graphlib
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PICTURE = ROOT / "optax_lossscale", ROOT / "docs/images/rooms.svg"
SVG = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 900 {}" role="img">
<title>The rooms of {} and what they import</title><marker id="tip" viewBox="0 0 8 8" refX="8"
 refY="4" markerWidth="6" markerHeight="6" orient="auto"><path d="M0 0 8 4 0 8z"/></marker><style>
text {{ font: 12px system-ui, sans-serif; text-anchor: middle; fill: #1b2430 }}
rect {{ fill: #fff; stroke: #8792a2 }} line {{ stroke: #1b2430; marker-end: url(#tip) }}
</style><rect width="900" height="100%" style="fill: #f4f6f9"/>
{}
</svg>
"""
LINE = '<line x1="{:.0f}" y1="{:.0f}" x2="{:.0f}" y2="{:.0f}"/>'
RECT = '<rect x="{:.0f}" y="{:.0f}" width="{:.0f}" height="64" rx="6"/>'
TEXT = '<text x="{:.0f}" y="{:.0f}"{}>{}</text>'


def modules(package: Path) -> dict[str, Path]:
    """Return the path of each module, by its name in the package: `_loss_scale.scale`."""
    paths = {p: p.relative_to(package).with_suffix("").parts for p in sorted(package.rglob("*.py"))}
    return {".".join(p for p in parts if p != "__init__"): path for path, parts in paths.items()}


def arrows(package: Path) -> dict[str, set[str]]:
    """Return the rooms that each room imports. The room "" is the package's `__init__.py`."""
    found: dict[str, set[str]] = {name.partition(".")[0]: set() for name in modules(package)}
    for importer, path in modules(package).items():
        nodes = [*ast.walk(ast.parse(path.read_text("utf-8")))]
        names = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
        froms = [(n.module, n.names) for n in nodes if isinstance(n, ast.ImportFrom)]
        names += [f"{module}.{alias.name}" for module, names in froms for alias in names]
        own = [f"{name}.".split(".")[1] for name in names if name.split(".")[0] == package.name]
        found[importer.partition(".")[0]] |= {room if room in found else "" for room in own}
    return {room: others - {room} for room, others in found.items()}


def draw(package: Path) -> str:
    """Return the picture, with each room below all that import it. A cycle is a `CycleError`."""
    imported, below, span, shapes = arrows(package), {}, {}, []
    order = [*graphlib.TopologicalSorter(imported).static_order()]
    for room in order:
        below[room] = imported[room].union(*(below[other] for other in imported[room]))
    level = dict.fromkeys(order, 0)
    for room in reversed(order):
        level |= {other: max(level[other], level[room] + 1) for other in imported[room]}
    for number in reversed(range(1 + max(level.values()))):
        row, top = sorted(room for room in order if level[room] == number), 20 + 104 * number
        for left, room in zip(range(15, 900, 880 // len(row)), row, strict=False):
            span[room] = left + 20, left + 880 // len(row) - 30
            x, width = sum(span[room]) / 2, span[room][1] - span[room][0] + 40
            files = [
                name[len(room) + 1 :] for name in modules(package) if name.startswith(f"{room}.")
            ]
            text = ", ".join(files) if room else "the public names"
            shapes += [
                RECT.format(left, top, width),
                TEXT.format(x, top + 20, ' font-weight="600"', room or package.name),
            ]
            for line, words in enumerate(textwrap.wrap(text, width // 6)):
                shapes.append(TEXT.format(x, top + 38 + 15 * line, "", words))
            for other in sorted(imported[room].difference(*(below[o] for o in imported[room]))):
                end, (first, last) = 20 + 104 * level[other], span[other]
                shapes.insert(0, LINE.format(x, top + 64, min(max(x, first), last), end))
    height = 84 + 104 * max(level.values()) + 20
    return SVG.format(height, package.name, "\n".join(shapes))


if __name__ == "__main__":
    PICTURE.write_text(draw(PACKAGE), "utf-8")
