"""Imports go down only; and the check that says so can fail"""
import json

import pytest

import floors
from floors import ROOT, chapters, direct, edges, imported, page, violations


def book_of(tmp_path, *notebooks: tuple[str, str, str]):
    "Chapters of made-up notebooks: (stem, default_exp, code)"
    (tmp_path/"nbs").mkdir()
    for stem, exp, code in notebooks:
        cells = [{"cell_type": "markdown", "source": f"# {stem}\n> a line"},
                 {"cell_type": "code", "source": f"#| default_exp {exp}"},
                 {"cell_type": "code", "source": f"#| export\n{code}"}]
        (tmp_path/"nbs"/f"{stem}.ipynb").write_text(json.dumps({"cells": cells}))
    return chapters(tmp_path)

def test_the_house_stands():
    assert violations(chapters()) == []

def test_the_check_sees_imports():
    assert len(edges(chapters())) > len(chapters())    # not vacuous: floors stand on floors

@pytest.mark.parametrize("code", [
    "from cpkv.engine import Engine", "import cpkv.engine", "import cpkv.engine as e",
    "from cpkv import engine", "from .engine import Engine", "from . import engine",
    "def f():\n    from cpkv.engine import Engine\n    return Engine",
    "if True:\n    import numpy, cpkv.engine",
])
def test_an_upward_import_fails(tmp_path, code):
    book = book_of(tmp_path, ("03_pool", "pool", code), ("17_engine", "engine", "x = 1"))
    said = "03_pool imports 17_engine: only chapters that sort before it may be imported"
    assert violations(book) == [said]

def test_an_upward_import_in_a_module_fails(tmp_path):
    book_of(tmp_path, ("02a_dense", "ops.dense", "x = 1"), ("17_engine", "engine", "x = 1"))
    (tmp_path/"cpkv"/"ops").mkdir(parents=True)
    (tmp_path/"cpkv"/"ops"/"dense.py").write_text("from ..engine import Engine\n")
    assert len(violations(chapters(tmp_path))) == 1

@pytest.mark.parametrize("below,above", [("02a", "02z"), ("02z", "03"), ("03", "03a"),
                                         ("03", "11"), ("11", "11b")])
def test_prefixes_sort_as_they_read(tmp_path, below, above):
    up = book_of(tmp_path, (f"{below}_a", "a", "import cpkv.b"), (f"{above}_b", "b", "x = 1"))
    assert len(violations(up)) == 1

def test_downward_is_fine_and_self_is_no_edge(tmp_path):
    book = book_of(tmp_path, ("02a_a", "a", "import cpkv.a"),
                   ("02b_b", "b", "from cpkv.a import x"))
    assert violations(book) == [] and len(edges(book)) == 1

def test_the_tour_may_look_everywhere_and_nobody_at_it(tmp_path):
    book = book_of(tmp_path, ("000_tour", "tour", "import cpkv.b"), ("02a_b", "b", "x = 1"),
                   ("03_c", "c", "import cpkv.tour"))
    assert violations(book) == ["000_tour is imported by 03_c: the tour is nobody's floor"]

def test_twins_are_refused(tmp_path):
    book = book_of(tmp_path, ("02a_a", "a", "x = 1"), ("02a_b", "b", "x = 1"),
                   ("03_c", "a", "x = 1"))
    assert len(violations(book)) == 2

def test_relative_imports_are_resolved():
    up, beside = "from ..laws import LawError", "from .dense import dense"
    assert imported(up, "cpkv.ops.dense") == {"cpkv.laws", "cpkv.laws.LawError"}
    assert imported(beside, "cpkv.ops.rows") == {"cpkv.ops.dense", "cpkv.ops.dense.dense"}
    assert imported("from os import path\nimport cpkvx", "cpkv.pool") == set()

def test_the_page_names_what_a_chapter_stands_on_without_what_is_implied(tmp_path):
    book = book_of(tmp_path, ("01_a", "a", ""), ("01a_d", "d", ""), ("02_b", "b", "import cpkv.a"),
                   ("03_c", "c", "import cpkv.d, cpkv.a, cpkv.b"))
    edges_of = [("02", "01"), ("03", "02"), ("03", "01a")]
    assert [(c.prefix, d.prefix) for c, d in direct(book)] == edges_of
    rows = [x.split(" | ") for x in page(book).split("\n") if x.startswith("| 0")]
    assert [(r[0], r[1], r[3]) for r in rows] == [
        ("| 03", "[03_c](../nbs/03_c.ipynb)", "[01a](../nbs/01a_d.ipynb) [02](../nbs/02_b.ipynb) |"),
        ("| 02", "[02_b](../nbs/02_b.ipynb)", "[01](../nbs/01_a.ipynb) |"),
        ("| 01a", "[01a_d](../nbs/01a_d.ipynb)", "nothing |"),
        ("| 01", "[01_a](../nbs/01_a.ipynb)", "nothing |")]

def test_the_page_is_up_to_date():
    assert (ROOT/floors.PAGE).read_text(encoding="utf-8") == page(chapters()), "run `make readme`"
