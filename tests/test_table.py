"The table holds every verb of the floor, each by its own name"
import ast
import inspect
from dataclasses import FrozenInstanceError, fields, replace
from pathlib import Path

import pytest

import cpkv.ops
from cpkv.ops.table import REF, Ops

VERBS = [f.name for f in fields(Ops) if f.name != "name"]

def test_the_verbs_are_those_of_the_floor():
    assert VERBS == ["dense", "dense_heads", "rms_norm", "layer_norm", "rope_interleaved",
                     "rope_half", "silu_mul", "route", "experts", "store_rows", "gather_rows",
                     "gather_pages", "page_rows", "restore_rows", "locs_of", "index_logits", "topk", "sparse_mla",
                     "merge_states"]

@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_is_what_it_is_called_typed_and_told_in_a_line(verb):
    fn = getattr(REF, verb)
    assert fn.__name__ == verb and fn.__module__.startswith("cpkv.ops.")
    assert fn.__doc__ and "\n" not in fn.__doc__ and not fn.__doc__.endswith(".")
    signature = inspect.signature(fn)
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    assert signature.return_annotation is not signature.empty

def test_a_table_cannot_be_changed_or_left_incomplete():
    with pytest.raises(FrozenInstanceError): REF.dense = None
    with pytest.raises(TypeError): Ops(name="half", dense=None)
    assert replace(REF, name="other").name == "other" and REF.name == "ref"

@pytest.mark.parametrize("path", sorted(Path(cpkv.ops.__file__).parent.glob("*.py")),
                         ids=lambda p: p.stem)
def test_verbs_read_no_environment_log_nothing_and_ask_no_device_for_a_number(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    imported = {a.name for n in nodes if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module for n in nodes if isinstance(n, ast.ImportFrom)}
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    called = {f.attr if isinstance(f, ast.Attribute) else getattr(f, "id", "") for f in called}
    assert not imported & {"os", "logging", "sys", "warnings"}
    assert not called & {"item", "cuda", "print", "getenv"}
