"""Benchmarks run, say their unit, and measure what they say; how fast is nobody's test"""
import json

import pytest

from cpkv import bench
from cpkv.bench import BENCHES, plan_once, run_bench, step_layer_us
from cpkv.laws import ConfigError, InputError
from cpkv.shared_kv import READERS


def test_every_number_has_a_unit_and_is_above_zero():
    r = run_bench("plan")
    assert all(k.endswith(("_us", "_ms")) and 0 < v < 1e9 for k, v in r.items())
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

def test_the_cache_runs_on_the_trace_that_it_is_given(monkeypatch, tmp_path):
    lines = [dict(hash_ids=[1, 2, i], input_length=1536) for i in range(3, 9)]
    trace = tmp_path/"trace.jsonl"
    trace.write_text("".join(json.dumps(x) + "\n" for x in lines))
    monkeypatch.setattr(bench, "bench_copies", lambda: {"copy_gb_s": 1.0})
    r = run_bench("cache", str(trace))
    assert {"match_p50_us", "match_mtok_s", "insert_p50_us", "match_128k_us", "key_us", "agreement_us",
            "copy_gb_s"} <= set(r)
    assert all(v > 0 for v in r.values())
    with pytest.raises(InputError, match="needs a trace"): run_bench("cache")
