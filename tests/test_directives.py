"""Standing orders that a machine can check; docs/directives.md says by whom each is held"""
import gc
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import cpkv.reader
from cpkv.all_gather import ForwardPlan, owned_rows
from cpkv.cli import main
from cpkv.engine import Engine, generate
from cpkv.handoff import send_plan
from cpkv.launch import run_ranks
from cpkv.laws import ConfigError
from cpkv.layout import PageLayout
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.pool import FORMATS, Pool
from cpkv.request import EngineConfig
from cpkv.scratch import Scratch
from cpkv.shared_kv import PROBE_DIMS, READERS
from cpkv.split import Extend, zigzag_of
from cpkv.world import Solo

ROOT = Path(__file__).parent.parent
CONFIG = parse_config(TINY, layers=3)
MODEL = Model(CONFIG, random_weights(CONFIG, seed=1), REF)
TEXT = np.random.default_rng(7).integers(0, 256, 90)
every_reader = pytest.mark.parametrize("reader", sorted(READERS))


def engine_of(world, chunk=1000, **more):
    more = dict(placement="cyclic" if more.get("reader") == "replicated" else "compute_owner") | more
    sizes = EngineConfig(page_size=4, chunk=chunk, device_tokens=256, max_tokens=256, **more)
    return Engine(world, MODEL, sizes)

def local(fn, ranks, *args): return run_ranks(fn, ranks, *args, backend="local", timeout=30)


# -- the page


def rows() -> list[list[str]]:
    "Order and holders of each line of the page's tables"
    lines = (ROOT/"docs"/"directives.md").read_text(encoding="utf-8").split("\n")
    cells = [[c.strip() for c in x.strip("|").split("|")] for x in lines if x.startswith("| ")]
    return [r for r in cells if r != ["order", "held by"]]

def test_every_order_is_held_by_something():
    assert len(rows()) > 20 and all(len(r) == 2 and all(r) for r in rows())

@pytest.mark.parametrize("row", rows(), ids=lambda r: r[0][:40])
def test_tests_that_are_named_exist(row):
    for file, name in re.findall(r"`tests/(test_\w+\.py)::(\w+)`", row[1]):
        assert f"\ndef {name}(" in (ROOT/"tests"/file).read_text(encoding="utf-8"), (file, name)
    for chapter in re.findall(r"arrives with `(\w+)`", row[1]):
        assert not (ROOT/f"nbs/{chapter}.ipynb").exists(), f"{chapter} is there: name what holds this"
    assert re.search(r"`tests/|review|arrives with `\d", row[1])


# -- prefill


def owners(peers, chunk):
    engine = engine_of(peers.world(), chunk, placement="cyclic")
    r = engine.begin(0, TEXT[:70])
    engine.prefill(r)
    return engine.layout.owner_of_page(r.pages).tolist()

def test_owners_stay_when_a_prompt_is_chunked():
    "Dealt round, an owner is a place in the chain; by computing rank it follows the chunks, and stays once dealt"
    want = local(owners, 3, 1000)
    assert len(want[0]) == 18 and len(set(want[0])) == 3
    for chunk in (3, 8, 33): assert local(owners, 3, chunk) == want

@every_reader
def test_tables_are_made_once_a_batch_and_serve_every_layer(monkeypatch, reader):
    made = dict.fromkeys(("upload", "owned_rows", "direct_rows"), 0)
    for name in made:
        def count(*args, name=name, real=getattr(cpkv.reader, name)):
            made[name] += 1
            return real(*args)
        monkeypatch.setattr(cpkv.reader, name, count)
    engine = engine_of(Solo(), 30, reader=reader)
    engine.prefill(engine.begin(0, TEXT[:70]))
    steps = 3
    assert CONFIG.num_hidden_layers == 3 and made == dict(upload=steps, owned_rows=steps, direct_rows=steps)

@every_reader
def test_no_dense_row_outlives_its_batch(reader):
    def tensors():
        gc.collect()
        kept = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes()
                for x in gc.get_objects() if issubclass(type(x), torch.Tensor)}
        return sum(kept.values())
    engine = engine_of(Solo(), 30, reader=reader)
    engine.prefill(engine.begin(0, TEXT[:9]))  # what is made once is made
    r = engine.begin(1, TEXT[:70])
    before = tensors()
    while engine.step(r) is None: assert tensors() <= before
    assert tensors() <= before and engine.scratch.free_bytes == len(engine.scratch.arena)
    engine.kept = torch.zeros(1000)
    assert tensors() == before + 4000  # it would be seen

def direct_or_not(peers):
    "Nine pages on two ranks, each page at the rank that computes it"
    world, lay = peers.world(), PageLayout(cp_size=2, page_size=4)
    ext = [Extend(request=0, start=0, stop=36)]
    split = zigzag_of("pages", ext, 4 * np.array([0, 3, 5, 7, 9])[:, None], aligned=True)
    pool = Pool(lay, has_index=(True, False), dims=PROBE_DIMS, format=FORMATS["fp32"], local_pages=6)
    reader = READERS["chunk_reuse"](world, pool, REF, Scratch(1 << 16), index_topk=8, v_dim=12, scale=.25)
    def plan(direct):
        return ForwardPlan(split=split, page_tables=(np.array([2, 4, 6, 3, 5, 7, 9, 8, 10]),), layout=lay,
                           rank=world.rank, owner=world.rank, tokens=(np.arange(36),), samples=(False,), direct=direct)
    return [([reader.layer_bytes(p, n) for n in (0, 1)], len(owned_rows(p)[0])) for p in (plan(True), plan(False))]

def test_a_direct_write_saves_the_filter_and_no_byte_where_the_chunk_is_reused():
    for (straight, filtered), rows_of_rank in zip(local(direct_or_not, 2), (20, 16)):
        assert straight[0] == filtered[0] and min(straight[0]) > 0
        assert (straight[1], filtered[1]) == (0, rows_of_rank)


# -- diagnostics and speed


LAYER_CODE = {"cpkv.reader", "cpkv.shared_kv", "cpkv.attention", "cpkv.model", "cpkv.nextn"}
ASKS = ("item", "tolist", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__")

@pytest.fixture
def asked(monkeypatch):
    "Who asks a tensor for a number, while a forward runs"
    said, inside = [], []
    for name in ASKS:
        def spy(x, *args, name=name, real=getattr(torch.Tensor, name)):
            where = sys._getframe(1)
            if inside and where.f_globals.get("__name__") in LAYER_CODE: said.append((name, where.f_code.co_name))
            return real(x, *args)
        monkeypatch.setattr(torch.Tensor, name, spy)
    real = Model.forward
    def forward(model, session):
        inside.append(1)
        try: return real(model, session)
        finally: inside.pop()
    monkeypatch.setattr(Model, "forward", forward)
    return said

@every_reader
def test_no_layer_asks_a_tensor_for_a_number(asked, reader):
    "On a GPU each would be a wait"
    engine = engine_of(Solo(), 30, reader=reader, format="fp8_packed")
    engine.prefill(engine.begin(0, TEXT[:70]))
    assert asked == []

def test_a_layer_that_asks_is_found(asked, monkeypatch):
    real = Model.project
    def project(model, layer, hidden_TD, turn):
        return real(model, layer, hidden_TD, turn) if hidden_TD.isfinite().all() else None
    monkeypatch.setattr(sys.modules[__name__], "LAYER_CODE", LAYER_CODE | {__name__})
    monkeypatch.setattr(Model, "project", project)
    engine = engine_of(Solo())
    engine.prefill(engine.begin(0, TEXT[:9]))
    assert asked == [("__bool__", "project")] * 3

@pytest.mark.parametrize("ranks", [1, 3])
def test_success_is_not_told(capfd, caplog, ranks):
    def run(peers):
        engine = engine_of(peers.world(), 30)
        generate(engine, 0, TEXT, 3), generate(engine, 1, TEXT, 3)
        return engine.leaked_pages()
    with caplog.at_level(0): assert local(run, ranks) == [0] * ranks
    assert capfd.readouterr() == ("", "") and not caplog.records


# -- scope


@pytest.mark.parametrize("words", ["--cuda-graph 1", "--decode-cp 2", "--pipeline 2", "--tree-drafts 2",
                                   "--draft-topk 2", "--move-kv 1", "--num-speculative-tokens 2"])
def test_what_was_never_made_to_work_is_refused(words, capsys):
    assert main(["demo", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words.split()[0] in err and err.count("\n") == 1

def test_a_sharded_decode_side_is_refused():
    with pytest.raises(ConfigError, match="sharded decode side is not built"):
        send_plan(PageLayout(cp_size=4, page_size=64), PageLayout(cp_size=2, page_size=64), [4])
