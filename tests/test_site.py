"""How notebooks become pages and the README"""
import importlib.util, json

import pytest

from floors import ROOT


def load(name: str):
    "A script of docs/ as a module"
    pytest.importorskip("nbformat")
    spec = importlib.util.spec_from_file_location(name, ROOT/"docs"/f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

def notebook(*cells: tuple[str, str]) -> str:
    "JSON of a notebook from (type, source)"
    code = dict(outputs=[], execution_count=None)
    return json.dumps(dict(nbformat=4, nbformat_minor=5, metadata={}, cells=[
        dict(cell_type=t, id=f"c{i}", metadata={}, source=s, **(code if t == "code" else {}))
        for i, (t, s) in enumerate(cells)]))

@pytest.mark.parametrize("source,tags", [
    ("x = 1", []), ("#| export\nx = 1", []), ("#| hide\nx = 1", ["remove-cell"]),
    ("#| default_exp layout", ["remove-cell"]), ("#| include: false\nx = 1", ["remove-cell"]),
    ("#| cuda\nx = 1", ["skip-execution"]), ("#| eval: false\nx = 1", ["skip-execution"]),
    ("#| echo: false\nx = 1", ["remove-input"]), ("#| output: false\nx = 1", ["remove-output"]),
    ("#| exporti\nx = 1", ["hide-input"]),
])
def test_directives_become_tags(source, tags):
    cell = load("nbdev_myst").read(notebook(("code", source))).cells[0]
    assert cell.metadata["tags"] == tags and "#|" not in cell.source

def test_names_become_links_and_nothing_else_does():
    page = load("nbdev_myst")
    link = "{py:obj}`PageLayout <cpkv.layout.PageLayout>`"
    assert page.linked("a `PageLayout` here", "cpkv.layout") == f"a {link} here"
    for md in ("# `PageLayout`", "[`PageLayout`](x.md)", "```\n`PageLayout`\n```", "`not_ours`",
               "`PageLayout(cp_size=2)`"):
        assert page.linked(md, "cpkv.layout") == md

def test_a_chapter_leads_to_its_library_page():
    text = notebook(("markdown", "# Layout\n> A line"), ("code", "#| default_exp layout"))
    assert "{py:mod}`cpkv.layout`" in load("nbdev_myst").read(text).cells[0].source

def test_readme_is_the_index_seen_from_the_root():
    readme = load("readme")
    assert readme.from_root("[a](../docs/x.md) [b](01_layout.ipynb) [c](#d)") \
        == "[a](docs/x.md) [b](nbs/01_layout.ipynb) [c](#d)"
    assert (ROOT/"README.md").read_text(encoding="utf-8") == readme.readme(), "run `make readme`"
