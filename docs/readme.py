"""README.md from `nbs/index.ipynb`; `--check` only compares"""
import json, posixpath, re, sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NOTE = "<!-- made from nbs/index.ipynb by docs/readme.py: edit there -->\n"
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s]+)")


def from_root(md: str) -> str:
    "Relative links of a notebook in nbs/, as seen from the root"
    return LINK.sub(lambda m: posixpath.normpath(posixpath.join("nbs", m[1])), md)

def shown(cell: dict) -> list[str]:
    "The blocks that a cell becomes"
    src = "".join(cell["source"])
    if cell["cell_type"] != "code": return [from_root(src)]
    directives = set(re.findall(r"^#\|\s*(\S+?):?(?:\s|$)", src, re.M))
    if "hide" in directives or not src.strip(): return []
    code = re.sub(r"^#\|.*\n?", "", src, flags=re.M).strip()
    blocks = [] if "echo" in directives or not code else [f"```python\n{code}\n```"]
    for out in cell["outputs"]:
        text = out.get("text") or out.get("data", {}).get("text/plain") or ""
        if text: blocks.append("```\n" + "".join(text).rstrip() + "\n```")
    return blocks

def readme() -> str:
    nb = json.loads((ROOT/"nbs"/"index.ipynb").read_text(encoding="utf-8"))
    return NOTE + "\n" + "\n\n".join(b.strip() for c in nb["cells"] for b in shown(c)) + "\n"

def main() -> None:
    path, text = ROOT/"README.md", readme()
    if "--check" not in sys.argv: path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit("README.md is not what nbs/index.ipynb says: run `make readme`")

if __name__ == "__main__": main()
