"""What the site makes of the list of chapters: tables of contents, the house, the API pages"""
import json
from pathlib import Path

import floors
from nbdev_myst import modules

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT/"docs"/"generated"


def toctree(caption: str, entries: list[str]) -> str:
    return "\n".join([":::{toctree}", f":caption: {caption}", ":hidden:", "", *entries, ":::", ""])

def contents(book: list[floors.Chapter]) -> str:
    "Tables of contents from the ground up, the tour first"
    tour = [c for c in book if floors.is_tour(c)]
    parts = [toctree("Tour", [f"../nbs/{c.stem}" for c in tour])] if tour else []
    for name, cs in reversed(floors.bands(book)):
        entries = [f"{c.prefix} {c.title} <../nbs/{c.stem}>" for c in cs]
        parts.append(toctree(name.capitalize(), entries))
    return "\n".join(parts)

def house(book: list[floors.Chapter]) -> str:
    "The floors as a building, each room a link"
    out = ["::::{div} house"]
    for name, cs in floors.bands(book):
        out += [f":::{{div}} band band-{name.split()[0]}", f"[{name}]{{.band-name}}", ""]
        by_floor: dict[int, list[floors.Chapter]] = {}
        for c in cs: by_floor.setdefault(c.floor, []).append(c)
        for _, rooms in sorted(by_floor.items(), reverse=True):
            out += [" ".join(f"[**{c.prefix}** {c.title}](../nbs/{c.stem}.ipynb){{.room}}"
                             for c in rooms), ""]
        out.append(":::")
    return "\n".join([*out, "::::"])

def ladder(book: list[floors.Chapter]) -> str:
    "The table and the picture that nbs/index.ipynb keeps as the output of its ladder cell"
    cells = json.loads((ROOT/"nbs"/"index.ipynb").read_text(encoding="utf-8"))["cells"]
    [cell] = [c for c in cells if "draw_ladder(" in "".join(c["source"])]
    [html] = [o["data"]["text/html"] for o in cell["outputs"] if "data" in o]
    return "\n".join([":::::{div} cell_output", "```{raw} html", "".join(html), "```", ":::::"])

def write(path: Path, text: str) -> None:
    "Write only what differs, so that Sphinx does not read it again"
    if path.exists() and path.read_text(encoding="utf-8") == text: return
    path.write_text(text, encoding="utf-8")

def api_pages(app) -> None:
    "One page a module, and the list of them"
    GENERATED.mkdir(exist_ok=True)
    book = {c.module: c for c in floors.chapters(ROOT)}
    rows = [f"| {{py:mod}}`{m}` | {book[m].summary if m in book else ''} |"
            for m in sorted(modules())]
    wanted = {"index.md": "\n".join([
        "# Library", "", "One module a chapter; `import cpkv` needs torch and numpy only.", "",
        "| module | what it is |", "|---|---|", *rows, "",
        ":::{toctree}", ":hidden:", "", *sorted(modules()), ":::", ""])}
    for mod in modules():
        stem = book[mod].stem if mod in book else ""
        chapter = f"Chapter: [{stem}](../../nbs/{stem}.ipynb)\n\n" if stem else ""
        wanted[f"{mod}.md"] = f"# {mod}\n\n{chapter}```{{eval-rst}}\n.. automodule:: {mod}\n```\n"
    for name, text in wanted.items(): write(GENERATED/name, text)
    for old in GENERATED.glob("*.md"):
        if old.name not in wanted: old.unlink()

def fill_in(app, docname: str, source: list[str]) -> None:
    "`<!-- contents -->`, `<!-- house -->` and `<!-- ladder -->` on a page of docs/"
    if not docname.startswith("docs/"): return
    for mark, make in (("<!-- contents -->", contents), ("<!-- house -->", house),
                       ("<!-- ladder -->", ladder)):
        if mark in source[0]: source[0] = source[0].replace(mark, make(floors.chapters(ROOT)))

def setup(app) -> dict:
    app.connect("builder-inited", api_pages)
    app.connect("source-read", fill_in)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
