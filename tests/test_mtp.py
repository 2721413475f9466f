"The draft's KV goes where the target's goes, at the same time, and depends on nothing else"
from functools import cache

import numpy as np
import pytest
import torch

from cpkv.engine import Engine, decode, generate
from cpkv.launch import run_ranks
from cpkv.model import TINY, Model, parse_config, random_weights
from cpkv.mtp import Draft, NoDraft
from cpkv.nextn import NextN, random_nextn
from cpkv.ops.table import REF
from cpkv.request import EngineConfig, Request, greedy
from cpkv.world import Solo

P, PROMPT = 8, np.random.default_rng(7).integers(0, 256, 75)


@cache
def models():
    config = parse_config(TINY, layers=3)
    model = Model(config, random_weights(config, 1), REF)
    return model, Draft(NextN(model, random_nextn(config, 1)))

def engine_of(world, chunk=1000, tokens=256, drafting=True, **more) -> Engine:
    model, draft = models()
    sizes = EngineConfig(page_size=P, chunk=chunk, device_tokens=tokens, max_tokens=tokens, **more)
    engine = Engine(world, model, sizes, draft=draft if drafting else None)
    engine.pool.poison(range(engine.pool.local_pages))
    return engine

def bytes_of(engine, r: Request, positions: int) -> dict:
    "Rows of this rank's pages, decoded bytes by page index and buffer; whole pages of what is computed"
    lay, out = engine.layout, {}
    for j, p in enumerate(r.pages[:positions // P].tolist()):
        if lay.owner_of_page(p) != engine.world.rank % lay.cp_size: continue
        for i, b in enumerate(engine.pool.buffers):
            if len(b.pages): out[j, i] = b.pages[lay.local_page_of(p)].clone()
    return out

def talk(peers, prompts, chunk=1000, **more):
    "Each prompt to its end, then 9 tokens decoded; tokens, bytes of the whole pages, cached, leaks"
    engine, said = engine_of(peers.world(), chunk, **more), []
    for i, prompt in enumerate(prompts):
        r = engine.begin(i, prompt)
        first = engine.prefill(r)
        tokens, _ = decode(engine, r, greedy(first), 9)
        said.append((tokens, bytes_of(engine, r, r.computed), r.cached))
        engine.finish(r)
    return said, engine.leaked_pages()

def joined(got, i): return {k: v for said, _ in got for k, v in said[i][1].items()}

def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)

def _alone(prompt):
    engine = engine_of(Solo(), reader="replicated")
    r = engine.begin(0, prompt)
    tokens, _ = decode(engine, r, greedy(engine.prefill(r)), 9)
    return tokens, bytes_of(engine, r, r.computed)


HOW = [dict(), dict(chunk=13), dict(chunk=24, reader="full_view"), dict(placement="cyclic", chunk=32),
       dict(split="interleave", placement="cyclic"), dict(split="zigzag", placement="cyclic", reader="full_view", chunk=7)]

@pytest.mark.parametrize("R,how", [*zip((1, 2, 3, 4, 8, 2), HOW)], ids=str)
def test_same_request_other_path_same_draft_bytes(R, how):
    tokens, want = _alone(PROMPT)
    def rank(peers): return talk(peers, [PROMPT], **how)
    got = run_ranks(rank, R, backend="local")
    assert all(said[0][0] == tokens and leaked == 0 for said, leaked in got)
    assert same(joined(got, 0), want)

def test_a_hit_has_the_draft_bytes_of_a_cold_run():
    "The second turn finds whole pages of pairs; what it adds is computed after them"
    later = np.append(PROMPT, np.arange(20))
    for R in (1, 3):
        def rank(peers): return talk(peers, [PROMPT, PROMPT, later])
        got = run_ranks(rank, R, backend="local")
        assert [c for _, _, c in got[0][0]] == [0, 72, 72] and not any(leaked for _, leaked in got)
        for i, prompt in enumerate((PROMPT, PROMPT, later)):
            tokens, want = _alone(prompt)
            assert got[0][0][i][0] == tokens and same(joined(got, i), want)

@pytest.mark.parametrize("n,hit", [(3, 0), (P - 1, 0), (P, 0), (P + 1, P), (2 * P, P), (2 * P + 1, 2 * P)])
def test_a_whole_page_needs_one_token_more(n, hit):
    "Pair keys: P tokens are P - 1 pairs"
    engine = engine_of(Solo())
    for expect in (0, hit):
        r = engine.begin(0, PROMPT[:n])
        assert r.cached == expect
        engine.prefill(r)
        engine.finish(r)
    assert engine.leaked_pages() == 0

def test_prompts_that_part_inside_a_page_or_at_its_end_share_what_their_drafts_share():
    "They part after 16 tokens: the pair of position 15 differs, so one page is shared and not two"
    engine, target = engine_of(Solo()), engine_of(Solo(), drafting=False)
    other = np.append(PROMPT[:16], PROMPT[16:40] ^ 1)
    for e, want in ((engine, 8), (target, 16)):
        r = e.begin(0, PROMPT)
        e.prefill(r)
        e.finish(r)
        assert e.begin(1, other).cached == want

def test_a_payload_without_a_draft_is_another_configuration():
    one, other = engine_of(Solo()), engine_of(Solo(), drafting=False)
    assert isinstance(other.draft, NoDraft) and len(one.pool.latent) == len(other.pool.latent) + 1
    assert one.pool.signature() != other.pool.signature()
    assert one.tree.root_digest != other.tree.root_digest

def test_the_target_says_the_same_with_a_draft_and_without():
    for R in (1, 2):
        def rank(peers, drafting): return generate(engine_of(peers.world(), 24, drafting=drafting), 0, PROMPT, 6)
        (a, x), (b, y) = (run_ranks(rank, R, d, backend="local")[0] for d in (True, False))
        assert a == b and torch.equal(x, y)

def test_bytes_are_predicted_with_the_drafts_layer_that_only_stores():
    def rank(peers):
        engine = engine_of(peers.world(), 24)
        r = engine.begin(0, PROMPT)
        engine.prefill(r)
        engine.finish(r)
        tags = [e.tag for e in engine.world.ledger.entries if e.layer == 3]
        return engine.world.ledger.received(), dict(engine.predicted), tags
    for got, predicted, tags in run_ranks(rank, 3, backend="local"):
        assert got == {k: v for k, v in predicted.items() if k in got} and 3 in predicted
        assert sum(t.startswith("view") for t in tags) == 2           # the last chunk alone attends

def test_decoded_tokens_extend_the_draft_too():
    "A batch of two that decode while a third prefills: the same bytes as each alone"
    prompts = [PROMPT[:20], PROMPT[10:51], PROMPT]
    def rank(peers):
        engine = engine_of(peers.world(), 26)
        rs = [engine.begin(i, p) for i, p in enumerate(prompts)]
        for r in rs[:2]: r.tokens = np.append(r.tokens, np.int32(greedy(engine.prefill(r))))
        for _ in range(4):
            batch = [(rs[0], len(rs[0].tokens)), (rs[1], len(rs[1].tokens))]
            if rs[2].computed < 72: batch.append((rs[2], rs[2].computed + 24))
            for (r, _), c in zip(batch, engine.compute(batch)):
                if c.token is not None: r.tokens = np.append(r.tokens, np.int32(c.token))
        return [bytes_of(engine, r, r.computed) for r in rs[:2]]
    got = run_ranks(rank, 2, backend="local")
    for i, prompt in enumerate(prompts[:2]):
        want = _alone(prompt)[1]
        mine = {k: v for bufs in got for k, v in bufs[i].items()}
        whole = {k: v for k, v in want.items() if k[0] < (len(prompt) + 4) // P}
        assert mine.keys() == whole.keys() and same(mine, whole)
