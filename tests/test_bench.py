"""Benchmarks run, say their unit, and measure what they say; how fast is nobody's test"""
import json
import re
from functools import partial

import pytest

from cpkv import bench
from cpkv.bench import BENCHES, bench_hf, plan_once, run_bench, step_layer_us
from cpkv.copies import bench_copies
from cpkv.laws import ConfigError, InputError
from cpkv.report import show_bench
from cpkv.shared_kv import READERS


KEY = re.compile(r"\w+_(us|ms|s|gb_s|mtok_s|ratio|share)|tokens")

def is_law(r: dict) -> bool:
    "Does each key say its unit, or that it has none, and is each shown under a name of its own?"
    rows = [line.split() for line in show_bench(r).split("\n\n")[0].split("\n")[1:]]
    return (all(KEY.fullmatch(k) for k in r) and len({row[0] for row in rows}) == len(r)
            and all(len(row) == 2 + k.endswith("s") - (k == "tokens") for k, row in zip(r, rows)))

def test_the_law_of_keys_can_fail():
    assert is_law(dict(a_us=1.0, tokens=3, b_ratio=2.0, b_share=1.0, b_gb_s=2.0))
    for bad in (dict(a=1.0), dict(a_us=1.0, a_ms=1.0), dict(us=1.0)): assert not is_law(bad)

def test_every_number_beside_transformers_says_its_unit_or_that_it_has_none():
    pytest.importorskip("transformers")
    r = bench_hf(num_tokens=70, blocks=1, steps=2)
    assert is_law(r) and {"prefill_ratio", "decode_ratio", "tokens"} <= set(r) and all(v > 0 for v in r.values())

def test_every_number_has_a_unit_and_is_above_zero():
    r = run_bench("plan")
    assert is_law(r) and all(k.endswith(("_us", "_ms")) and 0 < v < 1e9 for k, v in r.items())
    assert {"split_one_us", "plan_64_ms", "alloc_8x8192_ms", "owner_loc_131072_ms",
            "step_layer_us", "yardstick_ms"} <= set(r)

def test_without_a_name_all_of_them_run(monkeypatch):
    monkeypatch.setattr(bench, "yardstick", lambda: .002)
    assert {"plan", "link", "hf"} <= set(BENCHES)
    monkeypatch.setattr(bench, "BENCHES", {"a": lambda: {"a_us": 1.0}, "b": lambda: {"b_us": 1.0}})
    assert {"a_us", "b_us", "yardstick_ms"} == set(run_bench())
    assert run_bench("a") == {"a_us": 1.0, "yardstick_ms": 2.0}

@pytest.mark.parametrize("requests,num_tokens,ranks",
                         [(1, 1, 8), (1, 8192, 8), (64, 128, 8), (3, 65, 2)])
def test_a_plan_holds_every_token_of_the_batch(requests, num_tokens, ranks):
    plan, (rows, order, owned, direct) = plan_once(requests, num_tokens, ranks)()
    assert len(order) == len(set(order.tolist())) == requests * num_tokens
    assert rows.num <= num_tokens * requests and len(rows.index) % 32 == 0
    pages = -(-num_tokens // 64) * requests    # one rank has its part of them, by one list or the other
    locs = [*owned[1].tolist(), *direct[1].tolist()]
    assert len(set(locs)) == len(locs) <= -(-pages // ranks) * 64 + 64
    assert plan.direct == plan.split.aligned and (len(direct[0]) > 0) == plan.direct

@pytest.mark.parametrize("kind", READERS.values(), ids=READERS)
def test_a_layer_without_its_verbs_is_still_every_step_of_it(kind):
    assert 0 < step_layer_us(kind, layers=2) < 1e6

def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match="plan"): run_bench("speed")

@pytest.mark.parametrize("value,error", [("1", True), ("trace", True), ("0", False), ("", False)])
def test_no_number_is_taken_under_debug(monkeypatch, value, error):
    monkeypatch.setenv("CPKV_DEBUG", value)
    monkeypatch.setattr(bench, "BENCHES", {})
    monkeypatch.setattr(bench, "yardstick", lambda: 1.0)
    if not error: assert run_bench() == {"yardstick_ms": 1000}
    else:
        with pytest.raises(ConfigError, match="CPKV_DEBUG off"): run_bench()

def test_two_sides_are_timed_in_turns_and_say_what_they_said():
    calls = []
    def side(name): return lambda: (calls.append(name), len(calls))[1]
    best, said = bench._best_of((side("a"), side("b")), blocks=2, steps=3)
    assert calls == ["a"] * 3 + ["b"] * 3 + ["a"] * 3 + ["b"] * 3 and len(best) == 2
    assert said == [[1, 2, 3, 7, 8, 9], [4, 5, 6, 10, 11, 12]]

def test_a_trace_is_for_the_cache_alone_and_is_read_before_anything_runs(monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(bench, "BENCHES", {"plan": lambda: ran.append(1)})
    with pytest.raises(InputError, match="takes no --trace"): run_bench("plan", str(tmp_path/"none"))
    with pytest.raises(InputError, match="cannot read the trace"): run_bench(None, str(tmp_path/"none"))
    assert ran == []

def test_shares_are_of_the_plain_copy_in_the_same_direction():
    r = bench_copies(1, 2, 2, repeats=1)  # one round: the median is its quotient
    assert is_law(r) and r["backup_share"] == pytest.approx(r["backup_gb_s"] / r["copy_to_host_gb_s"])
    assert r["loadback_share"] == pytest.approx(r["loadback_gb_s"] / r["copy_to_device_gb_s"])
    ways = r["copy_to_host_gb_s"], r["copy_to_device_gb_s"]
    assert min(ways) <= r["copy_gb_s"] * (1 + 1e-9) and r["copy_gb_s"] <= max(ways) * (1 + 1e-9)

def test_the_cache_runs_on_the_trace_that_it_is_given(monkeypatch, tmp_path):
    lines = [dict(hash_ids=[1, 2, i], input_length=1536) for i in range(3, 9)]
    trace = tmp_path/"trace.jsonl"
    trace.write_text("".join(json.dumps(x) + "\n" for x in lines))
    monkeypatch.setattr(bench, "bench_copies", partial(bench_copies, 1, 2, 2, repeats=1))
    r = run_bench("cache", str(trace))
    assert {"match_p50_us", "match_mtok_s", "insert_p50_us", "match_128k_us", "key_us", "agreement_us",
            "backup_gb_s", "loadback_gb_s", "copy_gb_s", "copy_to_host_gb_s", "copy_to_device_gb_s",
            "backup_share", "loadback_share"} <= set(r)
    assert is_law(r) and all(v > 0 for v in r.values())
    with pytest.raises(InputError, match="needs a trace"): run_bench("cache")
