"""One conversation, however it is computed; and a comparison that can say no"""
import functools
import itertools
import json
import tempfile

import numpy as np
import pytest
import torch

from cpkv import demo, handoff
from cpkv.compare import differences
from cpkv.demo import (PROCESS_BYTES, find_model, name_roles, pools_bytes, prepare, role_of,
                       run_demo, wait_seconds)
from cpkv.engine import Engine
from cpkv.laws import CapacityError, ConfigError, ConservationError, CpkvError, InputError
from cpkv.memory import memory_bytes
from cpkv.model import TINY, parse_config
from cpkv.request import EngineConfig
from cpkv.shared_kv import FullView
from cpkv.talks import FOLLOW_UP, conversation_tokens, next_prompt, shipped_text

TEXT = shipped_text()
LATENT, INDEX = (32 + 16) * 4, 32 * 4                # bytes of a row of the tiny model in fp32
HAS_INDEX = (True, True, False, True, True)          # the last is the draft's
ONE_TOKEN = 5 * LATENT + 4 * INDEX


@functools.cache
def short(cp=2, page_size=16, chunk=96, tokens=100, num_output=3, **more):
    engine = dict(page_size=page_size, chunk=chunk, format="fp32") | more
    return run_demo(text=TEXT[:tokens], cp=cp, engine=engine, num_output=num_output,
                    backend="local")

def said(result) -> list[str]: return [t["output"] for t in result["turns"]]

WAYS = [(1, 16, 96), (2, 16, 96), (3, 16, 96), (4, 16, 96), (8, 16, 96),     # cp, page, chunk
        (4, 1, 1000), (2, 1, 50), (2, 64, 9), (3, 16, 16), (3, 16, 17), (2, 500, 64),
        (3, 7, 1 << 30)]


# -- the same conversation on every way

@pytest.mark.parametrize("cp,page_size,chunk", WAYS)
def test_ranks_pages_and_chunks_do_not_matter(cp, page_size, chunk):
    r = short(cp, page_size, chunk)
    assert r["ok"] and said(r) == said(short(2)) and r["leaked_pages"] == 0
    for t in r["turns"]:
        assert (t["max_abs_logit_diff"], t["kv_equal"], t["tokens_equal"]) == (0, True, True)

@pytest.mark.parametrize("cp", [1, 2, 3])
def test_bf16_says_the_same_on_any_number_of_ranks(cp):
    r = short(cp, format="bf16")
    assert r["ok"] and said(r) == said(short(2, format="bf16"))
    assert sum(r["rest_bytes_per_rank"]) * 2 == sum(short(2)["rest_bytes_per_rank"])

def test_the_shortest_text_a_token_at_a_time():
    one = dict(text=b"\n", turns=1, num_output=1, backend="local")
    r = run_demo(cp=2, engine=dict(page_size=4, chunk=1), **one)
    assert r["ok"] and said(r) == said(run_demo(cp=1, **one))
    assert [(t["prompt_tokens"], t["output_tokens"]) for t in r["turns"]] == [(66, 1)]


# -- identities of the JSON, from lengths alone

def chunks_of(start, stop, chunk, P):
    "(start, stop) of each chunk: whole pages, except the last"
    out = []
    while start < stop:
        end = stop if stop - start <= chunk else (start + chunk) // P * P
        if end <= start: end = start + chunk
        out.append((start, end))
        start = end
    return out

def most_rows(n, R):
    "Rows of the busiest rank when `n` are dealt in 2R parts, zigzag"
    part = [n // (2 * R) + (i < n % (2 * R)) for i in range(2 * R)]
    return max(part[r] + part[2 * R - 1 - r] for r in range(R))

def received(start, stop, chunk, P, R, row_bytes, reader, drafts):
    "Closed form of one layer: each chunk's rows, then the pages of history, in Phase 2 of the chunk too"
    total = 0
    for a, b in chunks_of(start, stop, chunk, P):
        pages = -(-(a if reader == "chunk_reuse" else b) // P)
        if drafts and b < stop: pages = 0    # a draft attends in the last chunk alone
        total += (R - 1) * (most_rows(b - a, R) + -(-pages // R) * P) * row_bytes
    return total             # pages are dealt round: the busiest owner has the most of them

@pytest.mark.parametrize("cp,page_size,chunk", WAYS[1:])
def test_bytes_are_those_predicted_on_every_way(cp, page_size, chunk):
    for t in short(cp, page_size, chunk)["turns"]:
        assert t["received_bytes"] == t["predicted_bytes"] == t["received_bytes"][:1] * cp
        assert all(n > 0 for n in t["received_bytes"][0])

@pytest.mark.parametrize("way,reader", [*zip(WAYS, itertools.cycle(["full_view", "chunk_reuse"]))])
def test_bytes_equal_the_closed_form(way, reader):
    cp, page_size, chunk = way
    r = short(cp, page_size, chunk, reader=reader, split="zigzag", placement="cyclic")
    assert r["ok"]
    if cp == 1: assert r["turns"][0]["received_bytes"] == [[0] * 5]
    for t in r["turns"]:
        start, stop = t["cached_tokens"], t["prompt_tokens"]
        want = [received(start, stop, chunk, page_size, cp, LATENT + INDEX * i, reader, n == 4)
                for n, i in enumerate(HAS_INDEX)]
        assert t["received_bytes"] == t["predicted_bytes"] == [want] * cp
        assert t["output_bytes"] == t["predicted_output_bytes"] == [(cp - 1) * 64 * 4] * cp
    assert cp == 1 or min(want) > 0

@pytest.mark.parametrize("cp,page_size,chunk", WAYS)
def test_numbers_of_a_turn_add_up(cp, page_size, chunk):
    r = short(cp, page_size, chunk)
    prompts = [100 + 65, 100 + 2 * 65 + 3]
    for t, prompt, known in zip(r["turns"], prompts, [0, prompts[0] - 1]):  # pairs are one fewer
        pages = -(-prompt // page_size)
        assert t["prompt_tokens"] == prompt == t["cached_tokens"] + t["computed_tokens"]
        assert t["cached_tokens"] == t["cached_device"] + t["cached_host"]
        assert t["cached_tokens"] == known // page_size * page_size
        assert t["handoff_pages"] == pages == t["pages_compared"] and t["output_tokens"] == 3
        assert t["handoff_bytes"] == sum(t["sent_bytes"]) == pages * page_size * ONE_TOKEN
        assert t["accept_length"] is None and len(t["received_bytes"]) == cp
    rest, page = r["rest_bytes_per_rank"], page_size * ONE_TOKEN
    assert len(rest) == cp and max(rest) - min(rest) <= page     # balanced to within a page
    assert r["replicated_bytes_per_rank"] == [sum(rest)] * cp == [pages * page] * cp
    assert r["handoff_pages"] == sum(t["handoff_pages"] for t in r["turns"])
    assert r["handoff_bytes"] == r["handoff_pages"] * page
    json.dumps(r, allow_nan=False)

def test_the_shipped_text_is_long_enough_and_its_bytes_are_the_tokens():
    assert len(TEXT) > 8000
    tokens = next_prompt(np.array([1, 2], np.int32), [3])
    assert tokens.tolist() == [1, 2, 3, *FOLLOW_UP] and tokens.dtype == np.int32

def test_a_pool_of_exactly_the_conversation_is_enough():
    [need] = conversation_tokens(TEXT[:100], 2, 4)
    r = run_demo(text=TEXT[:100], cp=2, engine=dict(page_size=16), num_output=4, backend="local",
                 device_tokens=need)
    assert r["ok"] and r["device_tokens"] == need
    with pytest.raises(CapacityError, match="longer than the pool"):
        run_demo(text=TEXT[:100], num_output=4, device_tokens=need - 1)

def test_a_checkpoint_gives_what_its_weights_gave(tmp_path):
    find_model(str(tmp_path), None, 0, None)
    same = run_demo(text=TEXT[:100], model=str(tmp_path), num_output=3, backend="local")
    assert same["ok"] and said(same) == said(short(2, format="fp8_packed"))
    two = run_demo(text=TEXT[:90], model=str(tmp_path), layers=2, num_output=2, backend="local")
    assert two["ok"] and two["layers"] == 2 and len(two["turns"][0]["received_bytes"][0]) == 2 + 1


@pytest.mark.parametrize("cp", [2, 3])
def test_a_replicated_cache_rests_whole_on_every_rank_and_is_sent_once(cp):
    r = short(cp, reader="replicated", placement="cyclic")
    assert r["ok"] and said(r) == said(short(2))
    assert r["rest_bytes_per_rank"] == r["replicated_bytes_per_rank"] == short(2)["replicated_bytes_per_rank"][:1] * cp
    assert [n > 0 for n in r["turns"][0]["sent_bytes"]] == [True] + [False] * (cp - 1)

def test_a_layer_split_has_no_handoff_and_says_so_before_a_process_starts():
    with pytest.raises(ConfigError, match="choose another reader"):
        run_demo(text=TEXT[:100], engine=dict(reader="layer_split", placement="cyclic"))
    with pytest.raises(ConfigError, match="choose split page"):
        run_demo(text=TEXT[:100], engine=dict(split="zigzag"))


@functools.cache
def four_turns(backend="local", **more):
    return run_demo(text=TEXT[:700], turns=4, num_output=3, backend=backend,
                    engine=dict(page_size=16, chunk=96), **dict(host_bytes=None) | more)

def test_a_conversation_comes_back_from_the_host_while_another_needs_the_device():
    r = four_turns()
    assert r["ok"] and r["leaked_pages"] == 0 and r["draft_layers"] == 1
    *first, back = r["turns"]
    assert [t["cached_host"] for t in first] == [0, 0, 0] and back["cached_host"] > 0
    assert back["cached_device"] + back["cached_host"] == (first[1]["prompt_tokens"] - 1) // 16 * 16
    page = sum(r["rest_bytes_per_rank"]) // back["handoff_pages"]
    assert r["loaded_host_bytes"] == back["cached_host"] // 16 * page
    assert r["written_host_bytes"] % page == 0 and r["written_host_bytes"] >= r["loaded_host_bytes"]
    assert all(0 < used <= budget for used, budget in zip(r["host_used_bytes"], r["host_budget_bytes"], strict=True))

def test_a_text_with_room_for_both_documents_loads_nothing_back():
    r = run_demo(text=TEXT[:100], turns=4, backend="local", host_bytes=None,
                 engine=dict(page_size=16, chunk=96))
    assert r["ok"] and r["loaded_host_bytes"] == 0 < r["written_host_bytes"]
    assert r["turns"][3]["cached_device"] == (r["turns"][1]["prompt_tokens"] - 1) // 16 * 16

def test_without_a_host_tier_that_part_is_computed_again_and_says_the_same():
    r = four_turns(host_bytes=0)
    assert r["ok"] and said(r) == said(four_turns()) and "host_used_bytes" not in r
    assert all(t["cached_host"] == 0 for t in r["turns"])
    assert r["turns"][-1]["computed_tokens"] > four_turns()["turns"][-1]["computed_tokens"]

def test_a_small_host_tier_keeps_what_fits():
    most = four_turns()
    r = four_turns(host_bytes=most["host_budget_bytes"][0] // 8)
    assert r["ok"] and said(r) == said(most) and max(r["host_used_bytes"]) <= most["host_budget_bytes"][0] // 8

def test_a_byte_that_changes_on_the_host_is_found(monkeypatch):
    from cpkv.tiers import DeviceAndHost
    real, done = DeviceAndHost.load, []
    def load(self, leased, request, held):
        if self.cache.world.rank == 1 and len(leased.host_pages) and not done:
            done.append(1)
            at = self.host.mine(leased.host_pages)[0]
            next(b for b in self.host.buffers if b.component == "index").pages[at, 5] ^= 64
        return real(self, leased, request, held)
    monkeypatch.setattr(DeviceAndHost, "load", load)
    r = run_demo(text=TEXT[:700], turns=4, num_output=3, backend="local", engine=dict(page_size=16, chunk=96), host_bytes=None)
    assert not r["ok"] and not any(map(differences, r["turns"][:3]))
    assert "KV bytes" in differences(r["turns"][3]) and r["turns"][3]["first_kv_difference"]["rank"] in (1, None)

@pytest.mark.parametrize("local_page", [False, True])
def test_a_load_that_fails_is_computed_again_and_every_byte_of_both_tries_was_predicted(monkeypatch, local_page):
    from cpkv.copy_thread import CopyThread, Kind
    from cpkv.laws import ResidencyError
    real, done = CopyThread._move, []
    def move(self, op):
        real(self, op)
        pages = self.host.mine(op.host_pages)
        if op.kind is not Kind.LOAD or self.host.rank != 1 or len(pages) < 2 or done: return
        done.append(int(pages[-1]))       # all that it moved is there, and nobody may believe it
        if local_page: raise ResidencyError("a page does not read", local_page=done[0])
        raise OSError("the link is gone")
    monkeypatch.setattr(CopyThread, "_move", move)
    r, want = four_turns.__wrapped__(), four_turns()
    assert done and r["ok"] and said(r) == said(want) and r["leaked_pages"] == 0
    assert [differences(t) for t in r["turns"]] == [[]] * 4
    back, was = r["turns"][3], want["turns"][3]
    assert was["cached_host"] > back["cached_host"] and (back["cached_host"] > 0) == local_page

def test_host_bytes_below_a_page_are_refused_before_a_process_starts():
    with pytest.raises(InputError, match="at least a page and its sink.*needed_bytes"):
        run_demo(text=TEXT[:100], host_bytes=10)


# -- it can fail: one fault each, injected where it would happen

def faulty(**more): return run_demo(text=TEXT[:100], engine=dict(page_size=16), cp=2, num_output=3,
                                    backend="local", **more)

def first_fault(r): return next((differences(t), t["first_kv_difference"]) for t in r["turns"]
                                if differences(t))

def test_without_a_fault_it_is_right():
    assert faulty()["ok"]

def test_a_byte_that_changes_on_the_way_is_found(monkeypatch):
    real = handoff.pack_pages
    def pack(pool, local):
        out = real(pool, local)
        if len(local) and pool.layout.cp_size == 2: out[-1, 7] ^= 64
        return out
    monkeypatch.setattr(handoff, "pack_pages", pack)
    r = faulty()
    bad, where = first_fault(r)
    assert not r["ok"] and "KV bytes" in bad
    assert where["side"] == "decode" and where["page"] in range(11)

@pytest.mark.parametrize("component", ["latent", "index"])
def test_a_byte_that_changes_at_rest_is_found_on_its_rank(monkeypatch, component):
    real = Engine.finish
    def finish(self, r):       # behind the first turn, in a page that the second turn reuses
        if self.world.rank == 1:
            page = next(p for p in r.pages if self.layout.owner_of_page(int(p)) == 1)
            getattr(self.pool, component)[1].pages[self.layout.local_page_of(int(page)), 5] ^= 64
        real(self, r)
    monkeypatch.setattr(Engine, "finish", finish)
    r = faulty()
    assert differences(r["turns"][0]) == [] and not r["ok"]
    bad, where = first_fault(r)
    assert "KV bytes" in bad and where == dict(side="prefill", page=where["page"], rank=1)
    assert where["page"] in range(9)

def test_bytes_that_were_not_predicted_are_found(monkeypatch):
    real = FullView.layer_bytes
    def more(self, plan, layer, *args): return real(self, plan, layer, *args) + (layer == 2)
    monkeypatch.setattr(FullView, "layer_bytes", more)
    assert first_fault(faulty()) == (["received bytes"], None)

def test_pages_that_leak_are_found(monkeypatch):
    real = Engine.abort
    def abort(self, r):
        if r.request == 0 or self.config.reader != "replicated": real(self, r)
    monkeypatch.setattr(Engine, "abort", abort)
    r = faulty()
    assert not r["ok"] and r["leaked_pages"] > 0 and not any(map(differences, r["turns"]))

def rank_1_finds(monkeypatch, value, where):
    real = Engine.prefill
    def prefill(self, r, *seen):
        out = real(self, r, *seen).clone()
        if self.world.size > 1 and self.world.rank == 1: out[where(out)] += value
        return out
    monkeypatch.setattr(Engine, "prefill", prefill)

def test_logits_are_compared_on_every_rank(monkeypatch):
    rank_1_finds(monkeypatch, -1e-3, torch.argmin)
    assert first_fault(faulty()) == (["logits"], None)

def test_ranks_that_sample_another_token_hand_nothing_over(monkeypatch):
    rank_1_finds(monkeypatch, float("nan"), torch.argmin)
    with pytest.raises(ConservationError, match="different requests"): faulty()

def test_another_word_is_found(monkeypatch):
    real = demo._oracle
    def oracle(peers, *args):
        turns = real(peers, *args)
        turns[1]["output"][-1] ^= 1
        return turns
    monkeypatch.setattr(demo, "_oracle", oracle)
    assert first_fault(faulty()) == (["tokens"], None)


# -- refusals, before anything starts

def no_ranks(*args, **kw): raise AssertionError("ranks were started")

@pytest.mark.parametrize("more,error,match", [
    (dict(cp=0), InputError, "cp must be at least 1"), (dict(cp=-1), InputError, "cp must"),
    (dict(text=b""), InputError, "text must"), (dict(turns=0), InputError, "turns must"),
    (dict(num_output=0), InputError, "num_output must"), (dict(layers=0), InputError, "layers"),
    (dict(layers=5), InputError, "layers"),
    (dict(engine=dict(page_size=0)), InputError, "page_size"),
    (dict(engine=dict(chunk=0)), InputError, "chunk"),
    (dict(engine=dict(format="fp7")), InputError, "format"),
    (dict(device_tokens=1), CapacityError, "longer than the pool"),
    (dict(device_tokens=1 << 50), CapacityError, "this machine has"),
    (dict(cp=100_000), CapacityError, "this machine has"),
    (dict(engine=dict(page_size=1 << 31)), CapacityError, "this machine has"),
    (dict(model="no/such/dir"), InputError, "no such checkpoint")], ids=str)
def test_refused_before_a_rank_starts(monkeypatch, more, error, match):
    monkeypatch.setattr(demo, "run_ranks", no_ranks)
    with pytest.raises(error, match=match): run_demo(**dict(text=TEXT[:90]) | more)

def test_a_good_job_would_start(monkeypatch):
    monkeypatch.setattr(demo, "run_ranks", no_ranks)
    with pytest.raises(AssertionError, match="were started"): run_demo(text=TEXT[:90])

def test_a_vocabulary_without_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "load_checkpoint",
                        lambda path, layers: (parse_config(TINY | dict(vocab_size=255)), {}))
    with pytest.raises(InputError, match="256"): find_model("", str(tmp_path), 0, None)

def test_memory_is_counted_as_it_is_taken(tmp_path):
    text = TEXT[:1000]
    job = prepare(str(tmp_path), text=text, cp=3, model=None, seed=0, layers=None,
                  engine=dict(page_size=16), device_tokens=None)
    from cpkv.world import Solo
    class Three(Solo): size = property(lambda self: 3, lambda self, n: None)
    class Any: config, ops = parse_config(TINY), None
    class Two: has_index, pairs = HAS_INDEX, True
    shard = Engine(Three(), Any(), job.engine, draft=Two()).pool.num_bytes()
    whole = demo._alone(Any(), Two(), job, 16).pool.num_bytes()
    assert pools_bytes(parse_config(TINY), HAS_INDEX, 3, job.engine) == 3 * shard + 2 * whole
    assert memory_bytes() > 2 * PROCESS_BYTES

def test_a_chunk_larger_than_the_conversation_costs_no_scratch(tmp_path):
    job = prepare(str(tmp_path), text=b"abc", cp=2, model=None, seed=0, layers=None,
                  engine=dict(chunk=1 << 31), device_tokens=None)
    assert job.engine.chunk == job.engine.max_tokens == conversation_tokens(b"abc", 2, 32)[0]


# -- who is who

def test_roles_are_named():
    assert [role_of(r, 2) for r in range(4)] == ["prefill", "prefill", "decode", "oracle"]
    assert name_roles("rank 1 lost rank 2 in x, 7 times", 2) == (
        "rank 1 (prefill) lost rank 2 (decode) in x, 7 times")
    assert name_roles("a is 1 on ranks 0, 1 and 3, 2 on rank 2", 2) == (
        "a is 1 on ranks 0 (prefill), 1 (prefill) and 3 (oracle), 2 on rank 2 (decode)")
    assert name_roles("shape [1, 2], frankly 3", 2) == "shape [1, 2], frankly 3"

@pytest.mark.parametrize("odd,said", [
    (0, "on on rank 0 (prefill), off on ranks 1 (prefill), 2 (decode) and 3 (oracle)"),
    (2, "off on ranks 0 (prefill), 1 (prefill) and 3 (oracle), on on rank 2 (decode)"),
    (3, "off on ranks 0 (prefill), 1 (prefill) and 2 (decode), on on rank 3 (oracle)")])
def test_debug_on_one_rank_only_is_refused_by_name(odd, said):
    env = [{"CPKV_DEBUG": "1" if r == odd else "0"} for r in range(4)]
    with pytest.raises(ConfigError) as e: faulty(env=env)
    assert e.value.exit_code == 2
    assert f"debug is {said}" in e.value.message and "env.CPKV_DEBUG is " in e.value.message

def test_debug_on_every_rank_changes_nothing():
    assert said(faulty(env=[{"CPKV_DEBUG": "1"}] * 4)) == said(faulty())

def test_an_error_of_a_role_names_it(monkeypatch):
    def decode(peers, *args):
        raise CpkvError(f"rank {peers.rank} has had enough", rank=peers.rank)
    monkeypatch.setattr(demo, "_decode", decode)
    with pytest.raises(CpkvError, match=r"rank 2 \(decode\) has had enough") as e: faulty()
    assert e.value.facts == dict(rank=2)

def test_waits_grow_with_the_text():
    assert wait_seconds(0) == 120 and wait_seconds(11_500) > 240 and wait_seconds(100_000) > 10_000


# -- real processes

def test_two_processes_and_no_folder_left(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    r = run_demo(text=TEXT[:100], engine=dict(page_size=16, chunk=96), num_output=3)
    assert r["ok"] and r == short(2, format="fp8_packed")
    assert list(tmp_path.glob("cpkv-*")) == []

def test_engine_defaults_are_those_of_the_command_line():
    from cpkv.options import OPTIONS
    defaults = {o.key: o.default for o in OPTIONS if o.command == "demo"}
    for key in ("page_size", "chunk", "format"): assert getattr(EngineConfig(), key) == defaults[key]
    assert torch.get_num_threads() == 1
