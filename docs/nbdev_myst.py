"""Notebooks as nbdev writes them, read as the pages that Sphinx shows

Directives (`#| export`) become tags, a name in backticks becomes a link to its API entry, and a
line under the title leads to the API page, so that notebooks stay plain Markdown in Jupyter.
"""
import ast, re
from configparser import ConfigParser
from functools import cache
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^#\|\s*([\w-]+)\s*:?\s*(.*)$")
NAME = re.compile(r"(?<![`\[\w{}])`([A-Za-z_][\w.]*)(\(\))?`(?![`\]])")
FENCE = re.compile(r"^\s*(```|~~~|:::)")


@cache
def flags() -> frozenset[str]:
    ini = ConfigParser(interpolation=None)
    ini.read(ROOT/"settings.ini", encoding="utf-8")
    return frozenset(ini["DEFAULT"]["tst_flags"].split())

@cache
def modules() -> dict[str, frozenset[str]]:
    "Module -> the dotted names in it that have an API entry"
    index = ast.parse((ROOT/"cpkv"/"_modidx.py").read_text(encoding="utf-8"))
    syms = ast.literal_eval(index.body[-1].value)["syms"]
    return {mod: frozenset(n.removeprefix(mod + ".") for n in names
                           if not any(part.startswith("_") for part in n.split(".")))
            for mod, names in syms.items() if is_there(mod)}

def is_there(mod: str) -> bool: return (ROOT/(mod.replace(".", "/") + ".py")).exists()

@cache
def homes() -> dict[str, tuple[str, ...]]:
    "Dotted name -> the modules that define it"
    table = {}
    for mod, names in modules().items():
        for n in names: table.setdefault(n, []).append(mod)
    return {n: tuple(mods) for n, mods in table.items()}

def target(name: str, here: str) -> tuple[str, str] | None:
    "Role and full name that `name` means on the page of module `here`"
    if name in modules(): return "mod", name
    if name.startswith("cpkv."):
        mod = next((m for m in modules() if name.startswith(m + ".")), None)
        return ("obj", name) if mod and name.removeprefix(mod + ".") in modules()[mod] else None
    at = homes().get(name, ())
    mod = here if here in at else at[0] if len(at) == 1 else None
    return ("obj", f"{mod}.{name}") if mod else None

def linked(md: str, here: str) -> str:
    "Markdown with its library names linked; headings and fences stay as they are"
    def link(m: re.Match) -> str:
        to = target(m[1], here)
        return f"{{py:{to[0]}}}`{m[1]}{m[2] or ''} <{to[1]}>`" if to else m[0]
    lines, fenced = [], False
    for line in md.split("\n"):
        if FENCE.match(line): fenced = not fenced
        plain = fenced or line.startswith(("#", "    ", "<"))
        lines.append(line if plain else NAME.sub(link, line))
    return "\n".join(lines)

def directives(source: str) -> tuple[dict[str, str], str]:
    "The directives at the head of a cell, and the cell without them"
    found, lines = {}, source.split("\n")
    while lines and (m := DIRECTIVE.match(lines[0])):
        found[m[1]] = m[2].strip()
        lines.pop(0)
    return found, "\n".join(x for x in lines if not re.search(r"#\|\s*hide_line", x)).strip("\n")

def tags(found: dict[str, str], source: str) -> list[str]:
    "What myst-nb should do with a code cell"
    off = lambda name: found.get(name, "").lower() == "false"
    if "hide" in found or off("include") or not source.strip() or "nbdev_export()" in source:
        return ["remove-cell"]
    out = []
    if off("eval") or flags() & found.keys(): out.append("skip-execution")
    if off("echo"): out.append("remove-input")
    elif "code-fold" in found or "exporti" in found: out.append("hide-input")
    if off("output"): out.append("remove-output")
    return out

def read(text: str):
    "A notebook for myst-nb"
    nb = nbformat.reads(text, as_version=4)
    nb.metadata.setdefault("language_info", {"name": "python"})
    here = next((f"cpkv.{m[1]}" for c in nb.cells if c.cell_type == "code"
                 and (m := re.search(r"^#\|\s*default_exp\s+(\S+)", c.source, re.M))), "")
    first = True
    for cell in nb.cells:
        found, cell.source = directives(cell.source)
        if cell.cell_type == "code":
            cell.metadata["tags"] = [*cell.metadata.get("tags", []), *tags(found, cell.source)]
        elif cell.cell_type == "markdown":
            if "hide" in found: cell.source = ""
            cell.source = linked(cell.source, here)
            if first and here in modules():
                cell.source += f"\n\n{{.api-link}}\nLibrary: {{py:mod}}`{here}`"
        first = False
    return nb
