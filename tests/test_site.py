"""How notebooks become pages and the README"""
import importlib.util, json, re, sys
from importlib.metadata import PackageNotFoundError, distribution
from types import SimpleNamespace

import pytest

from cpkv.draw import PALETTE, contrast
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


@pytest.fixture
def conf(monkeypatch):
    "docs/conf.py as a module"
    try: [distribution(p) for p in ("mermaidx", "sphinx-mathjax-offline", "docutils")]
    except PackageNotFoundError as e: pytest.skip(str(e))
    monkeypatch.setattr(sys, "path", [*sys.path])
    return load("conf")

def test_a_table_has_its_class_and_a_report_leads_to_its_tracker(conf):
    from docutils.core import publish_doctree
    from docutils.nodes import TextElement, reference, table
    tree = publish_doctree("""
=== ============ =======
no  report       held by
=== ============ =======
1   a-b/c.d#12   x
2   Mooncake#7   a/b#3
3   no report    x
=== ============ =======

= ===
a b
= ===
1 c#4
= ===
""")
    conf.shape_tables(None, tree)
    assert [t["classes"] for t in tree.findall(table)] == [["held-by", "columns-3"], ["b", "columns-2"]]
    links = [*tree.findall(reference)]
    assert [(x.astext(), x["refuri"]) for x in links] == [
        ("a-b/c.d#12", "https://github.com/a-b/c.d/issues/12"),
        ("Mooncake#7", "https://github.com/kvcache-ai/Mooncake/issues/7")]
    assert all(isinstance(x.parent, TextElement) for x in links)

def test_every_report_of_the_page_can_be_linked(conf):
    page = (ROOT/"docs"/"field-cases.md").read_text(encoding="utf-8")
    found = [m for x in re.findall(r"^\| \d+ \| (\S+#\d+) \|", page, re.M) if (m := conf.REPORT.fullmatch(x))]
    assert len(found) > 50 and all(m[1] or m[2] in conf.OWNERS for m in found)

def test_the_name_of_a_chapter_tells_its_line(conf):
    line = next(iter(conf.one_lines()["01_layout"].splitlines()))
    tree, body = '<a href="../nbs/01_layout.html">', '<a href="01_layout.html#x"><a href="more.html">'
    for name, named in ((conf.root_doc, tree), ("nbs/02a_dense", "")):
        context = dict(furo_navigation_tree=tree, body=tree + body)
        conf.tell_chapters(None, name, "page.html", context, None)
        told = tree.replace(">", f' title="{line}">')
        assert context == dict(furo_navigation_tree=told, body=(told if named else tree) + body)

def test_a_page_that_was_not_written_is_an_error(conf, tmp_path):
    (tmp_path/"a").touch()
    builder = SimpleNamespace(format="html", get_outfilename=lambda d: tmp_path/d)
    app = SimpleNamespace(builder=builder, env=SimpleNamespace(found_docs={"a"}))
    conf.check_written(app, None)
    app.env.found_docs |= {"b"}
    conf.check_written(app, OSError())        # there is an error already
    with pytest.raises(RuntimeError, match="not written: b;"): conf.check_written(app, None)

def test_a_line_in_the_colour_of_a_rank_is_seen_on_white():
    css = (ROOT/"docs"/"_static"/"cpkv.css").read_text(encoding="utf-8")
    light = dict(re.findall(r"(--rank-\d): (#\w+);", css.split("\nbody {", 1)[1].split("}", 1)[0]))
    pale = [c for c in PALETTE if contrast(c, "#FFFFFF") < 3]
    for rank, color in enumerate(PALETTE):
        for what in ("stroke", "fill"):
            rule = f'path[{what}="{color}"] {{ {what}: var(--rank-{rank}); }}'
            assert (rule in css) == (color in pale)
    assert len(light) == len(pale) > 0 and all(contrast(c, "#FFFFFF") >= 3 for c in light.values())
