"""The floor rule: a chapter imports only chapters whose prefix sorts before its own

Reads the notebooks (prefix and `default_exp`) and the imports of their exported cells and of the
modules they made. Writes what stands on what, `docs/floors.md`; `--check` only compares.
"""
import ast, json, re, sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = "docs/floors.md"
STEM = re.compile(r"(\d+[a-z]*)_\w+$")
BANDS = [("system", 17), ("memory policy", 13), ("mechanism", 5), ("ground", 0)]   # from the top


@dataclass(frozen=True)
class Chapter:
    "One notebook, its module, and what it imports"
    prefix: str                       # 07, 02a
    stem: str                         # 07_shared_kv
    module: str                       # cpkv.shared_kv; "" for a notebook that exports none
    title: str
    summary: str
    imports: frozenset[str] = field(default_factory=frozenset)   # modules of cpkv

    @property
    def floor(self) -> int: return int(re.match(r"\d+", self.prefix)[0])


def imported(source: str, module: str, is_package: bool = False) -> set[str]:
    "Dotted names under `cpkv` that the source of `module` imports, also inside functions"
    found, parts = set(), module.split(".")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import): found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = parts[:len(parts) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            found.add(base)
            found |= {f"{base}.{a.name}" for a in node.names}
    return {n for n in found if n == "cpkv" or n.startswith("cpkv.")}

def code_of(cell: dict) -> str:
    "The Python of a code cell: magics and shell lines are dropped"
    lines = "".join(cell["source"]).split("\n")
    return "\n".join(x for x in lines if not x.lstrip().startswith(("%", "!")))

def parsed(source: str, module: str) -> set[str]:
    try: return imported(source, module)
    except SyntaxError: return set()    # not Python (a cell magic): it exports nothing

def read_chapter(path: Path, root: Path) -> Chapter:
    m = STEM.match(path.stem)
    if not m: raise ValueError(f"{path.name}: a chapter is named NN_name.ipynb")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    head = "".join(cells[0]["source"]) if cells else ""
    title = re.search(r"^# (.+)$", head, re.M)
    summary = re.search(r"^> (.+)$", head, re.M)
    code = [code_of(c) for c in cells if c["cell_type"] == "code"]
    exp = next((x[1] for c in code if (x := re.search(r"^#\|\s*default_exp\s+(\S+)", c, re.M))), "")
    module = f"cpkv.{exp}" if exp else ""
    imports = set().union(*(parsed(c, module or "cpkv.nb") for c in code))
    made = root/(module.replace(".", "/") + ".py")
    if module and made.exists(): imports |= imported(made.read_text(encoding="utf-8"), module)
    return Chapter(m[1], path.stem, module, title[1] if title else path.stem,
                   summary[1] if summary else "", frozenset(imports))

def chapters(root: Path = ROOT) -> list[Chapter]:
    "Every chapter, from the ground up"
    paths = (p for p in (root/"nbs").glob("*.ipynb") if p.stem != "index")
    return sorted((read_chapter(p, root) for p in paths), key=lambda c: c.stem)

def edges(book: list[Chapter]) -> list[tuple[Chapter, Chapter]]:
    "(chapter, a chapter that it imports)"
    home = {c.module: c for c in book if c.module}
    return [(c, home[m]) for c in book for m in sorted(c.imports) if m in home and m != c.module]

def is_tour(c: Chapter) -> bool: return c.prefix == "000"

def violations(book: list[Chapter]) -> list[str]:
    "One sentence for each import that does not go down"
    out = [f"{c.stem} imports {d.stem}: only chapters that sort before it may be imported"
           for c, d in edges(book) if not d.prefix < c.prefix and not is_tour(c)]
    out += [f"{d.stem} is imported by {c.stem}: the tour is nobody's floor"
            for c, d in edges(book) if is_tour(d)]
    for what in ("prefix", "module"):
        seen: dict[str, Chapter] = {}
        for c in book:
            key = getattr(c, what)
            if key and key in seen:
                out.append(f"{c.stem} and {seen[key].stem} share the {what} {key}")
            seen.setdefault(key, c)
    return out

def direct(book: list[Chapter]) -> list[tuple[Chapter, Chapter]]:
    "The imports that no longer way down already implies"
    below = {c.stem: {d.stem for x, d in edges(book) if x == c} for c in book}
    def reach(stem: str) -> set[str]:
        return below[stem].union(*(reach(s) for s in below[stem])) if below[stem] else set()
    return [(c, d) for c, d in edges(book)
            if not any(d.stem in reach(s) for s in below[c.stem] - {d.stem})]

def band_of(c: Chapter) -> str: return next(name for name, low in BANDS if c.floor >= low)

def bands(book: list[Chapter]) -> list[tuple[str, list[Chapter]]]:
    "The bands that have chapters, from the top; the tour stands apart"
    rows = [(name, [c for c in book if not is_tour(c) and band_of(c) == name])
            for name, _ in BANDS]
    return [(name, cs) for name, cs in rows if cs]

def page(book: list[Chapter]) -> str:
    "docs/floors.md"
    below: dict[str, list[Chapter]] = {}
    for c, d in sorted(direct(book), key=lambda e: e[1].prefix):
        below.setdefault(c.stem, []).append(d)
    def link(c: Chapter, text: str) -> str: return f"[{text}](../nbs/{c.stem}.ipynb)"
    lines = ["# The floors", "",
             "<!-- made by tools/floors.py: `make readme` writes it anew -->", "",
             "A chapter imports only chapters whose prefix sorts before its own "
             "(`02a < 02z < 03 < 11 < 11b`).",
             "`tools/floors.py` reads the notebooks and the modules they export, "
             "writes this page and fails on an upward import.", "",
             "*Stands on* names the chapters that one imports; "
             "what a longer way down already implies is left out.", ""]
    for name, cs in bands(book):
        lines += [f"## {name.capitalize()}", "",
                  "| floor | chapter | in one line | stands on |", "|---|---|---|---|"]
        lines += [f"| {c.prefix} | {link(c, c.title)} | {c.summary} | "
                  f"{' '.join(link(d, d.prefix) for d in below.get(c.stem, [])) or 'nothing'} |"
                  for c in reversed(cs)]
        lines.append("")
    return "\n".join(lines)

def main() -> None:
    book = chapters()
    bad = violations(book)
    if bad: sys.exit("\n".join(bad))
    path, text = ROOT/PAGE, page(book)
    if "--check" not in sys.argv: path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is not what the notebooks say: run `make readme`")
    print(f"floors: {len(book)} chapters, {len(edges(book))} imports, all downwards")

if __name__ == "__main__": main()
