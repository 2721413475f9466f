"""Split x reader x format x path x ranks: every combination says what one rank alone says, bit for bit

Pairwise cover on threads in every run, a sample on processes, the full product under `--slow`.
"""
import itertools
from functools import cache

import numpy as np
import pytest
import torch

from cpkv.all_gather import SPLITS
from cpkv.demo import run_demo, shipped_text
from cpkv.engine import Engine, EngineConfig, generate
from cpkv.launch import run_ranks
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.ops.table import REF
from cpkv.pool import FORMATS
from cpkv.shared_kv import READERS
from cpkv.world import Solo

AXES = dict(split=sorted(SPLITS), reader=sorted(READERS), format=sorted(FORMATS),
            path=["cold", "hit", "chunked", "batch", "handoff"], cp=[1, 2, 3, 4, 8])
PROMPT = np.random.default_rng(5).integers(0, 256, 75)
OTHERS = [PROMPT[:1], PROMPT[20:61], PROMPT[:40]]
P, NUM = 8, 3


def pairwise(axes: dict) -> list[dict]:
    "Rows in which every two values of two axes meet, built greedily from the full product"
    names, rows = list(axes), [*itertools.product(*axes.values())]
    def pairs(row): return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)}
    open_, out = set().union(*map(pairs, rows)), []
    while open_:
        best = max(rows, key=lambda row: len(pairs(row) & open_))
        open_ -= pairs(best)
        out.append(dict(zip(names, best)))
    return out

def product(axes: dict) -> list[dict]: return [dict(zip(axes, v)) for v in itertools.product(*axes.values())]

def name(case: dict) -> str: return "-".join(map(str, case.values()))

@cache
def model() -> Model:
    config = parse_config(TINY, layers=3)
    return Model(config, random_weights(config, seed=2), REF)

def engine_of(world, case, chunk=1000) -> Engine:
    sizes = EngineConfig(page_size=P, chunk=chunk, device_tokens=256, max_tokens=256, format=case["format"],
                         split=case["split"], reader=case["reader"])
    engine = Engine(world, model(), sizes)
    engine.pool.poison()
    return engine

def run_case(peers, case: dict):
    "What one rank says of the prompt by one path"
    path = case["path"]
    engine = engine_of(peers.world(), case, chunk=13 if path == "chunked" else 1000)
    if path == "hit":
        generate(engine, 0, PROMPT[:50], 1)
        r = engine.begin(1, PROMPT)
        assert r.cached == 48
        engine.abort(r)
    if path == "batch":
        rs = [engine.begin(i, p) for i, p in enumerate([*OTHERS, PROMPT])]
        logits = engine.compute([(r, len(r.tokens)) for r in rs])[-1].logits
        for r in rs: engine.abort(r)
        out = [int(logits.argmax())], logits[None]
    else: out = generate(engine, 1, PROMPT, NUM)
    assert engine.world.ledger.received() == {k: v for k, v in engine.predicted.items() if k in engine.world.ledger.received()}
    return out, engine.leaked_pages()

@cache
def oracle(fmt: str):
    "One rank, replicated, cold, in one chunk"
    return generate(engine_of(Solo(), dict(format=fmt, split="zigzag", reader="replicated")), 0, PROMPT, NUM)

def check(case: dict, backend: str) -> None:
    if case["path"] == "handoff":
        r = run_demo(text=shipped_text()[:90], cp=case["cp"], num_output=2, backend=backend,
                     engine=dict(page_size=P, chunk=40, **{k: case[k] for k in ("split", "format", "reader")}))
        assert r["ok"] and r["leaked_pages"] == 0
        return
    tokens, logits = oracle(case["format"])
    for (got, rows), leaked in run_ranks(run_case, case["cp"], case, backend=backend):
        assert got == tokens[:len(got)] and torch.equal(rows, logits[:len(rows)]) and leaked == 0


COVER = pairwise(AXES)

def test_the_cover_is_one():
    seen = {(a, c[a], b, c[b]) for c in COVER for a, b in itertools.combinations(AXES, 2)}
    want = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    assert seen == want and len(COVER) < len(product(AXES)) / 8

@pytest.mark.parametrize("case", COVER, ids=name)
def test_on_threads(case): check(case, "local")

GLOO = [dict(split=s, reader=r, format=f, path=p, cp=c) for s, r, f, p, c in [
    ("zigzag", "full_view", "fp8_packed", "cold", 2), ("interleave", "full_view", "fp8_packed", "cold", 2),
    ("zigzag", "full_view", "fp32", "hit", 2), ("interleave", "full_view", "bf16", "hit", 3),
    ("zigzag", "full_view", "fp8", "chunked", 3), ("interleave", "full_view", "fp32", "chunked", 2),
    ("zigzag", "full_view", "bf16", "batch", 4), ("interleave", "full_view", "fp8_packed", "batch", 4),
    ("zigzag", "replicated", "fp8_packed", "batch", 2), ("interleave", "replicated", "fp32", "cold", 3),
    ("interleave", "full_view", "fp8_packed", "handoff", 2), ("zigzag", "full_view", "bf16", "handoff", 3)]]

@pytest.mark.parametrize("case", GLOO, ids=name)
def test_on_processes(case): check(case, "gloo")

@pytest.mark.slow
@pytest.mark.parametrize("case", product(AXES), ids=name)
def test_the_full_product(case): check(case, "local")
