"""The site: notebooks and pages as they stand in the checkout, built and read without a network

The source folder is the root of the checkout, so a relative link means the same here, in Jupyter
and on a forge: `sphinx-build -c docs . docs/_build/html` (`make site`).
"""
import hashlib, os, re, shutil, sys
from configparser import ConfigParser
from functools import cache
from html import escape
from importlib.metadata import distribution
from pathlib import Path

from docutils import nodes

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS), str(ROOT/"tools")]

ini = ConfigParser(interpolation=None)
ini.read(ROOT/"settings.ini", encoding="utf-8")
meta = ini["DEFAULT"]
project, author, release = meta["lib_name"], meta["author"], meta["version"]
version, copyright = release, meta["copyright"]

# Two scripts come out of pinned packages: no blob in the repository, no network, the same bytes.
SCRIPTS = {
    "mermaid.min.js": ("mermaidx", "mermaidx/assets/mermaid.js",
        "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"),
    "tex-svg-full.js": ("sphinx-mathjax-offline",
        "sphinx-mathjax-offline/static/mathjax/tex-svg-full.js",
        "a4354ff94fd868aea0cc6eaaa79a57fda0588646fc46ee3700a349ee0a11cbe6"),
}

def fetch_scripts(folder: Path) -> None:
    "Copy mermaid 11.16.0 and MathJax 3.2.2 from where pip put them"
    folder.mkdir(parents=True, exist_ok=True)
    for name, (package, path, digest) in SCRIPTS.items():
        src = Path(distribution(package).locate_file(path))
        if hashlib.sha256(src.read_bytes()).hexdigest() != digest:
            raise RuntimeError(f"{package}: {path} is not the script that was looked at")
        shutil.copyfile(src, folder/name)

fetch_scripts(DOCS/"_static"/"js")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.viewcode",
              "sphinx.ext.mathjax", "sphinx_design", "sphinx_copybutton",
              "mermaid_local", "docments_autodoc", "chapters"]

root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/generated/*.md", "nbs/**", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = ["nbs/index.ipynb", "nbs/llms.txt", "_build", "**/_*", "**/.ipynb_checkpoints"]

nb_custom_formats = {".ipynb": "nbdev_myst.read"}
nb_execution_mode = "off"             # stored outputs, the GPU's too; nbdev_test is the gate
nb_merge_streams = True
nb_output_stderr = "remove"
nb_code_prompt_show = nb_code_prompt_hide = "{type}"
nb_render_markdown_format = "myst"
myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "deflist", "tasklist", "alert",
                          "attrs_inline", "attrs_block", "linkify"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 3
myst_linkify_fuzzy_links = False

default_role = "code"                 # one backtick in a docstring
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "undoc-members": True, "show-inheritance": True}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 100

nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!cpkv\b).*"),         # no inventories of others: they would need a network
    (r"py:class", r"cpkv\..*"),          # types in annotations, among them our aliases
]
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]

mathjax_path = "js/tex-svg-full.js"
mathjax3_config = {"options": {"enableMenu": False}}

html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_extra_path = ["_extra"]
html_css_files, html_js_files = ["cpkv.css"], ["contents.js"]
html_show_search_summary = False      # it would fetch pages, which no browser does from disk
html_search_scorer = str(DOCS/"_static"/"scorer.js")
html_copy_source = html_show_sourcelink = html_show_sphinx = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#6cb8f6", "color-brand-content": "#6cb8f6"},
}
pygments_style, pygments_dark_style = "friendly", "monokai"
copybutton_exclude = ".linenos, .gp, .go"

if os.environ.get("CPKV_LINKCHECK") != "online": linkcheck_ignore = [r"https?://"]


REPORT = re.compile(r"(?:([\w.-]+)/)?([\w.-]+)#(\d+)")
OWNERS = {"Mooncake": "kvcache-ai"}   # of projects that are named without theirs

def shape_tables(app, doctree) -> None:
    "A table is classed by its last heading (cpkv.css); a report leads to its tracker"
    for table in doctree.findall(nodes.table):
        heads, *rows = [list(r.findall(nodes.entry)) for r in table.findall(nodes.row)]
        names = [h.astext() for h in heads]
        table["classes"] += [nodes.make_id(names[-1]), f"columns-{len(names)}"]
        for entry in [row[names.index("report")] for row in rows if "report" in names]:
            if m := REPORT.fullmatch(entry.astext()):
                url = f"https://github.com/{m[1] or OWNERS[m[2]]}/{m[2]}/issues/{m[3]}"
                entry[0][:] = [nodes.reference("", m[0], refuri=url, internal=False)]

@cache
def one_lines() -> dict[str, str]:
    import floors                     # tools/ is on the path now
    return {c.stem: c.summary for c in floors.chapters(ROOT)}

def tell_chapters(app, pagename, templatename, context, doctree) -> None:
    "A chapter's one line where a pointer rests on its name: sidebar, house and floors"
    def told(m: re.Match) -> str:
        line = one_lines().get(m[1])
        return f'{m[0]} title="{escape(line)}"' if line else m[0]
    for part in ("furo_navigation_tree", "body"):
        if part == "body" and pagename not in (root_doc, "docs/floors"): continue
        context[part] = re.sub(r'href="[^"#]*?(\w+)\.html"', told, context[part])

def check_written(app, exception) -> None:
    "With -j a process that fails can go unseen, and its pages are missing"
    if exception or app.builder.format != "html": return
    lost = [d for d in app.env.found_docs if not Path(app.builder.get_outfilename(d)).exists()]
    if lost: raise RuntimeError(f"not written: {', '.join(sorted(lost))}; build without -j")

def setup(app) -> None:
    app.connect("doctree-read", shape_tables)
    app.connect("html-page-context", tell_chapters, priority=900)   # after the theme
    app.connect("build-finished", check_written)
