"""docs/json.md lists every key that a command writes, and its type"""
import json
import re
from functools import partial

import pytest

from cpkv import bench, cli, demo, doctor, ladder
from cpkv.cli import COMMANDS, main
from cpkv.laws import ConservationError
from cpkv.talks import shipped_text
from floors import ROOT

PAGE = (ROOT/"docs"/"json.md").read_text(encoding="utf-8")
ROW = re.compile(r"\| `([^`]+)` \| ([^|]+) \| ([^|]+) \|")
PLAIN = dict(int=int, string=str, bool=bool, object=dict, null=type(None), any=object)


def table_of(heading: str) -> dict[str, str]:
    "Type of each key of the table below a heading"
    part = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    rows = [ROW.fullmatch(x) for x in part.split("\n") if x.startswith("| `")]
    assert all(rows) and len({m[1] for m in rows}) == len(rows)
    return {m[1]: m[2] for m in rows}

def fits(value, kind: str) -> bool:
    "Has a value the type that the page says?"
    if kind.startswith("list of "): return type(value) is list and all(fits(v, kind[8:]) for v in value)
    if " or " in kind: return any(fits(value, k) for k in kind.split(" or "))
    if kind == "number": return type(value) in (int, float)
    if kind.startswith("object by "): return type(value) is dict
    return isinstance(value, PLAIN[kind]) and (type(value) is not bool or kind in ("bool", "any"))

def told(doc: dict, types: dict[str, str], at: str = "") -> set[str]:
    "Keys of an object, each of its type; what is keyed by data is one key"
    seen = set()
    for name, value in doc.items():
        key = at + name
        assert key in types, f"docs/json.md has no {key}"
        assert fits(value, types[key]), (key, types[key], value)
        seen.add(key)
        if isinstance(value, dict) and not types[key].startswith("object by "):
            seen |= told(value, types, f"{key}.")
        if isinstance(value, list):
            for v in value:
                if isinstance(v, dict): seen |= told(v, types, f"{key}[].")
    return seen

def check(docs: list[dict], command: str, but: str = "error") -> None:
    "The keys of some results are those of the page, but for what none of them can show"
    types = table_of("Every command") | table_of(command)
    if command == "ladder":
        types |= {k.replace("rows", "baselines"): v for k, v in types.items() if k.startswith("rows[]")}
    seen = set().union(*(told(doc, types) for doc in docs))
    assert {k for k in types if not re.match(but, k)} - seen == set(), "not written"

@pytest.fixture
def write(tmp_path, capsys):
    "What a command writes as JSON"
    def run(*words):
        path = tmp_path/"r.json"
        path.unlink(missing_ok=True)
        main([*map(str, words), "--json", str(path)])
        return json.loads(path.read_text())
    return run

def test_demo_and_inspect(write, tmp_path, monkeypatch):
    "A turn with a page that differs has every key; so has a trace in which two ranks part"
    text, trace, oracle = tmp_path/"text", tmp_path/"trace.jsonl", demo._oracle
    text.write_bytes(shipped_text()[:200])
    def lies(*args):
        turns = oracle(*args)
        turns[1]["digests"][3] = "other"
        return turns
    monkeypatch.setattr(demo, "_oracle", lies)
    monkeypatch.setattr(cli, "run_demo", partial(demo.run_demo, backend="local", num_output=2))
    monkeypatch.setenv("CPKV_DEBUG", f"trace:{trace}")
    doc = write("demo", "--file", text)
    assert not doc["ok"] and not doc["turns"][1]["kv_equal"]
    check([doc], "demo")
    monkeypatch.delenv("CPKV_DEBUG")
    assert write("inspect", trace)["ok"]
    events = [json.loads(x) for x in trace.read_text().splitlines()]
    next(e for e in events if e["kind"] == "commit" and e["rank"] == 1)["request"] = 99
    trace.write_text("".join(json.dumps(e, separators=(",", ":")) + "\n" for e in events))
    doc = write("inspect", trace)
    assert doc["first_difference"] and not doc["ok"]
    check([doc], "inspect")

def test_ladder(write, monkeypatch):
    monkeypatch.setattr(cli, "run_ladder", partial(ladder.run_ladder, backend="local"))
    docs = [write("ladder", "--cp", 2, "--history", 100, "--chunk", 40), write("ladder", "--model", "glm-5")]
    assert all(doc["ok"] for doc in docs)
    check(docs, "ladder")

def test_bench(write, monkeypatch, tmp_path):
    "Small sizes, and no process"
    trace = tmp_path/"trace.jsonl"
    trace.write_text("".join(json.dumps(dict(hash_ids=[1, 2, i], input_length=1536)) + "\n" for i in range(3, 9)))
    monkeypatch.setattr(bench, "run_ranks", lambda fn, R, sizes, backend: [[1e-3] * len(sizes)])
    monkeypatch.setattr(bench, "bench_copies", partial(bench.bench_copies, nodes=1, layers=1, repeats=1))
    monkeypatch.setitem(bench.BENCHES, "hf", partial(bench.bench_hf, 64, blocks=1, steps=1))
    names = ["plan", "link", *(["hf"] if bench_has_hf() else [])]
    docs = [write("bench", n) for n in names] + [write("bench", "cache", "--trace", trace)]
    check(docs, "bench", "error" if bench_has_hf() else "error|hf_|tokens|prefill_|decode_")

def bench_has_hf() -> bool:
    try: import transformers  # noqa: F401
    except ImportError: return False
    return True

def test_doctor(write, monkeypatch):
    monkeypatch.setattr(cli, "run_doctor", lambda: [doctor.check("loopback", False, "nothing", "plug it in")])
    check([write("doctor")], "doctor")

def test_a_failure(write, monkeypatch):
    def run(config): raise ConservationError("page has two holders", page=7)
    monkeypatch.setitem(COMMANDS, "bench", COMMANDS["bench"]._replace(run=run))
    doc, types = write("bench", "plan"), table_of("Every command")
    assert told(doc, types) == types.keys()

def test_every_command_has_its_table():
    headings = re.findall(r"^## (.+)$", PAGE, re.M)
    assert headings[0] == "Every command" and {*headings[1:]} == {*COMMANDS}

@pytest.mark.parametrize("value,kind", [
    (1.5, "int"), (True, "int"), (None, "number"), ([1, "a"], "list of int"), ([[1], 2], "list of list of int"),
    ("1", "number or null"), ([], "object by rank"), (1, "bool"), (0, "null")])
def test_a_value_of_another_type_is_seen(value, kind): assert not fits(value, kind)

@pytest.mark.parametrize("doc", [dict(schema=1, more=2), dict(schema="1"), dict(error=dict(where=1))])
def test_a_key_that_the_page_lacks_is_seen(doc):
    with pytest.raises(AssertionError): told(doc, table_of("Every command"))
