"""`mermaid` fences drawn in the reader's browser by a script that lies beside the page

One file and no modules, so it works from disk; it redraws when light turns to dark.
"""
from html import escape

from docutils import nodes
from sphinx.util.docutils import SphinxDirective


class Mermaid(SphinxDirective):
    "A diagram; Jupyter and forges draw the same fence themselves"
    has_content = True

    def run(self) -> list[nodes.Node]:
        self.env.metadata[self.env.docname]["mermaid"] = "yes"
        source = escape("\n".join(self.content))
        return [nodes.raw("", f'<pre class="mermaid">{source}</pre>', format="html")]


def add_script(app, pagename, templatename, context, doctree) -> None:
    "Only pages with a diagram load the 3 MB"
    if "mermaid" in app.env.metadata.get(pagename, {}):
        app.add_js_file("js/mermaid.min.js", priority=700)
        app.add_js_file("mermaid-start.js", priority=701)

def setup(app) -> dict:
    app.add_directive("mermaid", Mermaid)
    app.connect("html-page-context", add_script)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
