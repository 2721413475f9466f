"""One word per thing: the glossary's banned synonyms appear nowhere"""
import json, re

import pytest

from floors import ROOT

GLOSSARY = (ROOT/"docs"/"glossary.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    "Cells of the first table below a heading"
    part = GLOSSARY.split(heading, 1)[1].split("\n## ", 1)[0]
    lines = [x for x in part.split("\n") if x.startswith("|")]
    return [[c.strip() for c in x.strip("|").split("|")] for x in lines[2:]]

BANNED = {word: say for say, words in rows("## Said and not said")
          for word in re.findall("`([^`]+)`", words)}
LONGEST_FIRST = sorted(BANNED, key=len, reverse=True)
PATTERN = re.compile(r"\b(" + "|".join(map(re.escape, LONGEST_FIRST)) + r")\b")


def found(text: str) -> list[str]:
    return [f"{m[1]!r}: say {BANNED[m[1]]!r}" for m in PATTERN.finditer(text)]

def source_of(path) -> str:
    if path.suffix != ".ipynb": return path.read_text(encoding="utf-8")
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return "\n".join("".join(c["source"]) for c in cells)

PAGES = [*(ROOT/"nbs").glob("*.ipynb"), *(ROOT/"docs").glob("*.md"), *(ROOT/"cpkv").rglob("*.py"),
         ROOT/"CONTRIBUTING.md", ROOT/"CHANGELOG.md"]

@pytest.mark.parametrize("path", sorted(p for p in PAGES if p.name != "glossary.md"),
                         ids=lambda p: p.relative_to(ROOT).as_posix())
def test_no_banned_synonym(path):
    assert found(source_of(path)) == []

def test_the_check_can_fail():
    assert len(BANNED) > 30
    assert found("the block table of a request") == ["'block table': say 'page'"]
    assert found("a refcount") and not found("a lease on a page table")

def test_words_are_sorted_and_defined_once():
    words = [w for w, _ in rows("# Words")]
    assert words == sorted(words, key=str.lower) and len(set(words)) == len(words) > 35
    assert not set(words) & set(BANNED)
