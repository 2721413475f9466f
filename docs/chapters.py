"""What the site makes from the list of chapters: the tables of contents, the house, the API pages"""
from pathlib import Path

import floors
from nbdev_myst import modules

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ROOT/"docs"/"generated"


def toctree(caption: str, entries: list[str], hidden: str = ":hidden:") -> str:
    return "\n".join([":::{toctree}", f":caption: {caption}", hidden, "", *entries, ":::", ""])

def contents(book: list[floors.Chapter]) -> str:
    "Tables of contents from the ground up, the tour first"
    tour = [c for c in book if floors.is_tour(c)]
    parts = [toctree("Tour", [f"../nbs/{c.stem}" for c in tour])] if tour else []
    for name, cs in reversed(floors.bands(book)):
        parts.append(toctree(name.capitalize(), [f"{c.prefix} {c.title} <../nbs/{c.stem}>" for c in cs]))
    return "\n".join(parts)

def house(book: list[floors.Chapter]) -> str:
    "The floors as a building, each room a link"
    out = ["::::{div} house"]
    for name, cs in floors.bands(book):
        out += [f":::{{div}} band band-{name.split()[0]}", f"[{name}]{{.band-name}}", ""]
        by_floor: dict[int, list[floors.Chapter]] = {}
        for c in cs: by_floor.setdefault(c.floor, []).append(c)
        for _, rooms in sorted(by_floor.items(), reverse=True):
            links = " ".join(f'[**{c.prefix}** {c.title}](../nbs/{c.stem}.ipynb){{.room}}' for c in rooms)
            out += [f"{links}", ""]
        out.append(":::")
    return "\n".join([*out, "::::"])

def write(path: Path, text: str) -> None:
    "Write only what differs, so that Sphinx does not read it again"
    if not path.exists() or path.read_text(encoding="utf-8") != text: path.write_text(text, encoding="utf-8")

def api_pages(app) -> None:
    "One page a module, and the list of them"
    GENERATED.mkdir(exist_ok=True)
    book = {c.module: c for c in floors.chapters(ROOT)}
    wanted = {"index.md": "# Library\n\nOne module a chapter; `import cpkv` needs torch and numpy only.\n\n"
                          + "| module | what it is |\n|---|---|\n"
                          + "".join(f"| {{py:mod}}`{m}` | {book[m].summary if m in book else ''} |\n"
                                    for m in sorted(modules()))
                          + "\n" + toctree("", sorted(modules())).replace(":caption: \n", "")}
    for mod in modules():
        chapter = f"Chapter: [{book[mod].stem}](../../nbs/{book[mod].stem}.ipynb)\n\n" if mod in book else ""
        wanted[f"{mod}.md"] = f"# {mod}\n\n{chapter}```{{eval-rst}}\n.. automodule:: {mod}\n```\n"
    for name, text in wanted.items(): write(GENERATED/name, text)
    for old in GENERATED.glob("*.md"):
        if old.name not in wanted: old.unlink()

def fill_in(app, docname: str, source: list[str]) -> None:
    "`<!-- contents -->` and `<!-- house -->` on a page of docs/"
    if not docname.startswith("docs/"): return
    for mark, make in (("<!-- contents -->", contents), ("<!-- house -->", house)):
        if mark in source[0]: source[0] = source[0].replace(mark, make(floors.chapters(ROOT)))

def setup(app) -> dict:
    app.connect("builder-inited", api_pages)
    app.connect("source-read", fill_in)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
