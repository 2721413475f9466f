"""Every option and variable is in one table, and the page is made from it"""
import argparse
import re

import knobs
from floors import ROOT

from cpkv import options
from cpkv.cli import COMMANDS, make_parser
from cpkv.evidence import VARIABLES
from cpkv.options import OPTIONS, knobs_table, options_of

PAGE = (ROOT/knobs.PAGE).read_text(encoding="utf-8")
CONTRACT = {"file": None, "cp": 2, "page_size": 64, "chunk": 2048, "format": "fp8_packed",
            "placement": "compute_owner", "seed": 0, "model": None, "layers": None, "device_tokens": None,
            "host_bytes": None, "num_speculative_tokens": None, "transport": "plain",
            "experiment": None}


def parsers() -> dict[str, argparse.ArgumentParser]:
    [sub] = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return sub.choices

def test_the_page_is_up_to_date(): assert PAGE == knobs.page(), "run `make readme`"

def test_the_parser_has_what_the_table_has_and_nothing_else():
    assert parsers().keys() == COMMANDS.keys() == {"demo", "doctor", "bench", "inspect", "ladder"}
    for name, p in parsers().items():
        knobs_of = {a.dest for a in p._actions} - {"help", "json"}
        assert knobs_of == {o.key for o in options_of(name)}
        assert {a.dest: a.default for a in p._actions if a.dest in knobs_of} == {
            o.key: o.default for o in options_of(name)}

def test_every_option_of_the_demo_is_there_with_its_default():
    assert {o.key: o.default for o in options_of("demo")} == CONTRACT

def test_every_option_has_its_row():
    for o in OPTIONS:
        row = next(x for x in knobs_table().split("\n") if f"| `{o.command}` | `{o.said}` |" in x)
        assert o.help in row and (o.unset if o.default is None else f"`{o.default}`") in row
        for value in o.choices: assert f"`{value}`" in row
        for value in (o.later if isinstance(o.later, dict) else ()):
            assert f"`{value}`" in row.split("to come")[1]
        assert o.default is None or not o.unset
        assert o.default is not None or o.unset
    assert knobs_table().count("\n| `") == len(OPTIONS) + len(VARIABLES)

def names_in(text: str) -> set[str]: return set(re.findall(r"\bCPKV_[A-Z][A-Z_]*\b", text))

def test_every_variable_that_the_library_names_is_in_the_table():
    known = {name for name, *_ in VARIABLES}
    for path in (ROOT/"cpkv").rglob("*.py"):
        assert names_in(path.read_text(encoding="utf-8")) <= known, path
    assert names_in("x CPKV_NEW y CPKV_A_B") == {"CPKV_NEW", "CPKV_A_B"}

def test_the_library_reads_no_other_variable_by_name():
    "Of the process's environment: torchrun's, and what the launcher sets for its children"
    foreign = {"RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
    read = re.compile(r"""(?:environ(?:\.get)?\s*[\[(]|getenv\()\s*["'](\w+)["']""")
    for path in (ROOT/"cpkv").rglob("*.py"):
        assert set(read.findall(path.read_text(encoding="utf-8"))) <= foreign, path
    assert read.findall("os.environ['A'] os.environ.get(\"B\") os.getenv('C')") == ["A", "B", "C"]

def test_a_new_option_changes_the_page(monkeypatch):
    more = options.Option(command="demo", name="turbo", help="faster", unset="off")
    monkeypatch.setattr(options, "OPTIONS", (*OPTIONS, more))
    assert "`--turbo`" in knobs.page() and knobs.page() != PAGE and "turbo" in {
        a.dest for a in parsers()["demo"]._actions}
