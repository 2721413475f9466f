"""A notebook a module, a module a notebook; and the check of the export can fail"""
import json
from pathlib import Path

import pytest

from floors import ROOT, chapters
from in_step import differences

BOOK = [c for c in chapters() if c.module]
MADE_BY_NBDEV = {"__init__.py", "_modidx.py"}


@pytest.mark.parametrize("chapter", BOOK, ids=lambda c: c.stem)
def test_notebook_has_its_module(chapter):
    path = ROOT/(chapter.module.replace(".", "/") + ".py")
    assert path.exists() and f"{chapter.stem}.ipynb" in path.read_text(encoding="utf-8")
    name = chapter.module.rsplit(".", 1)[1]
    assert chapter.stem.split("_", 1)[1] == name

def test_every_module_has_its_notebook():
    modules = {p.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
               for p in (ROOT/"cpkv").rglob("*.py") if p.name not in MADE_BY_NBDEV}
    assert modules == {c.module for c in BOOK}

@pytest.mark.parametrize("path", sorted((ROOT/"nbs").glob("*.ipynb")), ids=lambda p: p.stem)
def test_cells_have_ids_and_no_traces_of_a_run(path):
    nb = json.loads(path.read_text(encoding="utf-8"))
    assert (nb["nbformat"], nb["nbformat_minor"]) >= (4, 5)
    first = nb["cells"][0]
    assert first["cell_type"] == "markdown" and "".join(first["source"]).startswith("# "), "no title"
    ids = [c["id"] for c in nb["cells"]]
    assert len(set(ids)) == len(ids)
    assert all(c["execution_count"] is None for c in nb["cells"] if c["cell_type"] == "code")

@pytest.fixture
def toy(tmp_path):
    "A project of one notebook, in step"
    root = tmp_path/"a toy"
    (root/"nbs").mkdir(parents=True)
    (root/"cpkv").mkdir()
    for name in ("settings.ini", "pyproject.toml"):
        (root/name).write_bytes((ROOT/name).read_bytes())
    (root/"cpkv"/"__init__.py").write_text('__version__ = "0.1.0"\n')
    write_toy(root, "x = 1")
    fix(root)
    return root

def write_toy(root: Path, code: str) -> None:
    cell = dict(metadata={}, outputs=[], execution_count=None, cell_type="code")
    cells = [dict(cell_type="markdown", id="a0", metadata={}, source=["# Toy\n", "> A line"]),
             dict(cell, id="a1", source=["#| default_exp toy"]),
             dict(cell, id="a2", source=["#| export\n", code])]
    nb = dict(cells=cells, nbformat=4, nbformat_minor=5, metadata=dict(
        kernelspec=dict(display_name="python3", language="python", name="python3")))
    (root/"nbs"/"01_toy.ipynb").write_text(json.dumps(nb, indent=1) + "\n")

def fix(root: Path) -> None:
    "Put the toy in step by taking over the fresh export"
    import shutil, tempfile
    from in_step import exported
    with tempfile.TemporaryDirectory() as tmp:
        copy = exported(root, Path(tmp).resolve())
        for folder in ("nbs", "cpkv"): shutil.copytree(copy/folder, root/folder, dirs_exist_ok=True)

def test_export_check_passes_and_fails(toy):
    assert differences(toy) == []
    write_toy(toy, "x = 2")
    (toy/"cpkv"/"orphan.py").write_text("")
    found = differences(toy)
    assert any(f.startswith("cpkv/toy.py: run nbdev-export") for f in found)
    assert "cpkv/orphan.py: no notebook exports it; delete it" in found
