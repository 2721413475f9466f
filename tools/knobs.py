"""docs/knobs.md from the option and variable tables of the library; `--check` only compares"""
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PAGE = "docs/knobs.md"
HEAD = """# Options and variables

<!-- made by tools/knobs.py from cpkv.options: `make readme` writes it anew -->

Everything that can be set, from the tables that the program itself parses. Nothing else exists.

"""


def page() -> str:
    from cpkv.options import knobs_table
    return HEAD + knobs_table().strip() + "\n"

def main() -> None:
    path, text = ROOT/PAGE, page()
    if "--check" not in sys.argv: path.write_text(text, encoding="utf-8")
    elif not path.exists() or path.read_text(encoding="utf-8") != text:
        sys.exit(f"{PAGE} is not what cpkv.options says: run `make readme`")

if __name__ == "__main__": main()
