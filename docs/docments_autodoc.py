"""Comments beside parameters (fastcore's docments) as the field list of an API entry"""
import inspect

from fastcore.docments import docments


def clean(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("*", r"\*")

def add_fields(app, what, name, obj, options, lines) -> None:
    if what not in ("function", "method", "class"): return
    if what == "class" and getattr(obj, "__dataclass_fields__", None) is None: return
    try: docs = docments(inspect.unwrap(obj), full=False, returns=True)
    except Exception: return      # no source, or a signature that fastcore cannot read: no fields
    fields = []
    for k, v in docs.items():
        if not v or k == "self": continue
        fields.append(f":returns: {clean(v)}" if k == "return" else f":param {k}: {clean(v)}")
    if fields and not any(x.startswith(":param") for x in lines): lines.extend(["", *fields, ""])

def setup(app) -> dict:
    app.connect("autodoc-process-docstring", add_fields)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
