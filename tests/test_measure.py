"Counts, roofs, timers and differences say what they mean"
import math
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpkv import measure as m

H200, NAN, INF = m.DEVICES["h200"], float("nan"), float("inf")


@pytest.mark.parametrize("n,text", [(0, "0 B"), (1, "1 B"), (1023, "1023 B"), (1024, "1 KiB"),
                                    (656 * 131_072, "82 MiB"), (2**30 - 1, "1 GiB"),
                                    (26.2 * 2**30, "26.2 GiB"), (2**60, "1024 PiB"),
                                    (-2048, "-2 KiB")])
def test_sizes_step_by_1024(n, text): assert m.bytes_text(n) == text


@pytest.mark.parametrize("s,text", [(0, "0 ns"), (3e-10, "0.3 ns"), (18.8e-6, "18.8 µs"),
                                    (.9996, "1 s"), (.0125, "12.5 ms"), (90, "90 s"),
                                    (4000, "4000 s"), (NAN, "nan ns")])
def test_durations_step_by_1000(s, text): assert m.seconds_text(s) == text


def test_rates_and_flops_step_by_1000():
    assert m.rate_text(4.8e12) == "4.8 TB/s" and m.rate_text(999.6e9) == "1 TB/s"
    assert m.flops_text(2 * 4096**3) == "137 GFLOP" and m.flops_text(0) == "0 FLOP"


def test_the_table_holds_dense_rates_and_single_directions():
    d = m.DEVICES
    h20, a100, b200 = d["h20"], d["a100"], d["b200"]
    assert list(d) == ["h200", "h100", "h20", "a100", "b200"]
    assert (H200.memory_bytes, H200.memory_rate) == (141e9, 4.8e12)
    assert (H200.bf16_rate, H200.fp8_rate, H200.link_rate) == (989e12, 1979e12, 450e9)
    assert (h20.bf16_rate, h20.fp8_rate, h20.memory_rate) == (148e12, 296e12, 4e12)
    assert (a100.bf16_rate, a100.memory_rate, a100.nic_rate) == (312e12, 2.039e12, 25e9)
    assert (b200.memory_bytes, b200.bf16_rate, b200.link_rate) == (180e9, 2250e12, 900e9)
    for x in d.values():
        assert all(getattr(x, f"{r}_rate") > 0 for r in m.RATES) and x.source
        assert x.fp8_rate >= x.bf16_rate and pickle.loads(pickle.dumps(x)) == x
    assert len(m.device_rows(*d.values())) == 5 and m.device_rows(H200)[0][:3] == ("H200", 141, 4.8)


def test_the_largest_time_binds():
    needs = m.roofline(H200, memory=4.8e9, bf16=989e9, link=1)
    assert list(needs) == ["memory", "bf16", "link"] and needs["memory"] == pytest.approx(1e-3)
    assert m.roof_seconds(H200, memory=4.8e9, link=450e6) == pytest.approx(1e-3)
    assert next(iter(m.roofline(H200, memory=4.8e9, link=900e9))) == "link"
    assert m.roof_seconds(H200) == 0 and m.roofline(H200, fp8=0) == {"fp8": 0}


@pytest.mark.parametrize("roof,stated,said", [("link", NAN, "H200 states no link rate"),
                                              ("nic", 0., "H200 states no nic rate"),
                                              ("host", -1., "H200 states no host rate")])
def test_a_roof_that_nobody_stated_is_refused(roof, stated, said):
    device = replace(H200, **{f"{roof}_rate": stated})
    with pytest.raises(ValueError, match=said): m.roofline(device, **{roof: 1})
    with pytest.raises(ValueError, match="no roof 'disk'"): m.roofline(device, disk=1)


@given(new=st.integers(0, 60), history=st.integers(0, 60), k=st.integers(0, 130))
@settings(max_examples=150, deadline=None)
def test_pairs_equal_a_count_one_by_one(new, history, k):
    seen = [history + i + 1 for i in range(new)]
    assert m.causal_pairs(new, history) == sum(seen)
    assert m.picked_pairs(new, history, k) == sum(min(n, k) for n in seen)


def test_flops_equal_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode
    T, N, H, D, latent, rope = 3, 5, 2, 7, 8, 4
    with FlopCounterMode(display=False) as counter:
        torch.randn(T, D) @ torch.randn(D, 6)
        q, rows = torch.randn(T, H, latent + rope), torch.randn(T, N, latent + rope)
        (q @ rows.mT).softmax(-1) @ rows[..., :latent]
        logits = torch.randn(T * H, D) @ torch.randn(D, N)  # of each head
        torch.randn(T, 1, H) @ logits.relu().view(T, H, N)  # their weighted sum
    ours = [m.dense_flops(T, D, 6), m.sparse_mla_flops(T * N, H, latent, rope),
            m.index_logits_flops(T * N, H, D)]
    assert counter.get_total_flops() == sum(ours)


def clock_of(*spans):
    "A clock that gives these spans, one a run"
    ticks = iter([t for i, s in enumerate(spans) for t in (10. * i, 10. * i + s)])
    return lambda: next(ticks)


def test_a_timing_is_the_median_after_the_warm_up():
    runs = []
    t = m.timed(lambda: runs.append(1), repeats=5, warmup=2, clock=clock_of(9, 2, 1, 3, 2),
                memory=9.6e12)
    assert (t.seconds, t.best, t.repeats, len(runs)) == (2, 1, 5, 7)
    assert t.share(H200) == pytest.approx(1)
    assert t.text(H200) == "2 s, memory 4.8 TB/s, 100% of the memory roof of H200"
    assert m.timed(int, repeats=1, clock=clock_of(3)).text(H200) == "3 s"
    both = m.timed(int, repeats=1, clock=clock_of(1e-3), bf16=494.5e9, memory=1.0)
    assert both.text() == "1 ms, bf16 494 TFLOP/s, memory 1 kB/s"
    assert "50% of the bf16 roof" in both.text(H200)


def test_a_timing_of_nothing_is_refused():
    with pytest.raises(ValueError, match="needs a run"): m.timed(int, repeats=0)


@pytest.mark.cuda
def test_a_timing_on_cuda_waits_for_the_device():
    a = torch.randn(4096, 4096, device="cuda")
    work = m.dense_flops(4096, 4096, 4096)
    t = m.timed(lambda: a @ a, device="cuda", repeats=5, bf16=work)
    assert t.share(m.DEVICES["b200"]) < 1  # a launch alone would be far faster than any roof


def test_this_cpu_is_measured_when_asked():
    d = m.this_cpu(copy_bytes=m.MIB, side=64)
    assert d.memory_rate > 0 and d.bf16_rate == d.fp8_rate > 0 and d.memory_bytes > 2**28
    assert all(math.isnan(r) for r in (d.link_rate, d.nic_rate, d.host_rate))
    assert m.roof_seconds(d, memory=1e9) > 0
    with pytest.raises(ValueError, match="this CPU states no link rate"): m.roofline(d, link=1)


def test_the_yardstick_does_the_same_work_everywhere():
    assert m._yardstick_work() == 458_752
    assert m.yardstick() > 0 and m.best_seconds(int, repeats=2) >= 0


KINDS = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0), (63,), (5, 7)])
def test_equal_values_differ_by_exactly_nothing(kind, shape):
    x = (torch.arange(math.prod(shape)).reshape(shape) % 5 - 2).to(kind)
    assert m.calc_diff(x, x.clone()) == 0 == m.max_abs_diff(x, x.clone())


@given(st.integers(1, 200), st.floats(-30, 30), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_the_difference_is_the_textbook_form_and_has_no_scale(n, log_scale, seed):
    rng = np.random.default_rng(seed)
    x, y = rng.standard_normal((2, n))
    textbook = 1 - 2 * (x @ y) / (x @ x + y @ y)
    assert m.calc_diff(x, y) == pytest.approx(textbook, abs=1e-12) == m.calc_diff(y, x)
    assert m.calc_diff(x * 10**log_scale, y * 10**log_scale) == pytest.approx(m.calc_diff(x, y))
    assert 0 <= m.calc_diff(x, y) <= 2


def test_the_difference_keeps_its_meaning_at_the_ends_of_the_range():
    one, zero = np.ones(4), np.zeros(4)
    pairs = [(zero, zero), (one, zero), (one, -one), (one * 1e300, one * 1e300)]
    assert [m.calc_diff(x, y) for x, y in pairs] == [0, 1, 2, 0]
    assert m.calc_diff(one * 1e-300, one * 3e-300) == pytest.approx(.4)
    assert m.calc_diff(one, one * (1 + 2**-40)) > 0  # the textbook form loses this to rounding


@pytest.mark.parametrize("x,y,diff,gap", [
    ([1, NAN], [1, NAN], 0, 0), ([1, NAN], [1, 2], INF, INF), ([1, 2], [NAN, 2], INF, INF),
    ([INF, 1], [INF, 1], 0, 0), ([INF, 1], [-INF, 1], INF, INF), ([INF], [NAN], INF, INF),
    ([NAN, 3], [NAN, 1], .4, 2), ([NAN, NAN], [NAN, NAN], 0, 0)])
def test_a_nan_that_stands_alone_is_an_infinite_difference(x, y, diff, gap):
    for wrap in (np.array, torch.tensor):
        assert m.calc_diff(wrap(x), wrap(y)) == pytest.approx(diff)
        assert m.max_abs_diff(wrap(x), wrap(y)) == gap


def test_shapes_must_be_equal_and_are_not_broadcast():
    for f in (m.calc_diff, m.max_abs_diff):
        with pytest.raises(ValueError, match="shapes differ"): f(np.zeros((3, 1)), np.zeros(3))
