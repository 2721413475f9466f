"""The phases side by side: forecasts are the exact forms, and a run says what was forecast"""
import functools
import itertools
import json

import pytest
import torch

from floors import ROOT

from cpkv import ladder
from cpkv.cli import main
from cpkv.config import TINY, parse_config
from cpkv.ladder import balanced_bytes, run_ladder
from cpkv.rehearse import BASELINES, RUNGS, find_case, rehearse
from cpkv.rehearse import forecast as planned
from cpkv.laws import CapacityError, ConfigError, InputError
from cpkv.model import random_weights, save_checkpoint
from cpkv.nextn import random_nextn

K, M = 1024, 1024 * 1024
ROW = {"fp8_packed": 656 + 132, "bf16": 1152 + 256}
KEYS = {"phase", "name", "rest_bytes_per_rank", "received_bytes_per_layer",
        "predicted_bytes_per_layer", "balanced_bytes_per_layer", "gathers_per_layer",
        "remaps_per_forward", "output_bytes_per_forward", "scratch_bytes", "capacity_ratio_pool",
        "capacity_ratio_net", "max_abs_diff", "exposed_ms", "measured"}


@functools.cache
def forecast(name: str, **more) -> dict[str, dict]:
    "Rows of a model without weights, by name"
    return by_name(run_ladder(name, **more))

def by_name(result: dict) -> dict[str, dict]:
    return {r["name"]: r for r in result["rows"] + result["baselines"]}

@pytest.fixture(scope="module")
def glm5() -> dict[str, dict]: return forecast("glm-5")


# -- exact forms, from the worked tables

def test_the_worked_table_of_the_bounds():
    "MB a rank and layer at 8 ranks: chunk 5.6 (bf16 10.1), 16K 11.3, view 90.4 and 723"
    def mb(reader, history, chunk, row=788):
        return round(balanced_bytes(reader, history, chunk, 8, row) / 1e6, 1)
    assert [mb("replicated", 128 * K, c) for c in (8 * K, 16 * K)] == [5.6, 11.3]
    assert mb("replicated", 0, 8 * K, ROW["bf16"]) == 10.1
    assert [mb("chunk_reuse", n, 0) for n in (128 * K, M)] == [90.4, 723.0]
    assert [mb("chunk_reuse", n, 0, 132) for n in (128 * K, M)] == [15.1, 121.1]
    assert [mb("chunk_reuse", n, 0, 656) for n in (128 * K, M)] == [75.2, 601.9]
    assert [mb("layer_split", n, 0) for n in (128 * K, M)] == [103.3, 826.3]
    assert mb("layer_split", 128 * K, 8 * K) == round(103.285 + 6.455 + 5.648, 1)
    assert mb("full_view", 128 * K, 8 * K) == 101.7 == round(90.374 + 2 * 5.648, 1)

@pytest.mark.parametrize("reader", ladder.LIMITS)
def test_one_rank_receives_nothing(reader): assert balanced_bytes(reader, 1000, 10, 1, 788) == 0

def test_a_limit_that_is_whole_is_an_integer():
    assert type(balanced_bytes("replicated", 0, 8, 8, 788)) is int
    assert balanced_bytes("replicated", 0, 1, 3, 788) == pytest.approx(788 * 2 / 3)

def test_even_sizes_have_no_filler(glm5):
    for r in glm5.values():
        assert r["predicted_bytes_per_layer"] == r["balanced_bytes_per_layer"], r["name"]
        assert r["filler_ratio"] == 1
    assert [glm5[r.name]["predicted_bytes_per_layer"] for r in RUNGS] == [
        5_648_384, 101_670_912, 96_022_528, 96_022_528, 96_022_528]

def longest(tokens: int, ranks: int) -> int:
    "Rows of the busiest rank of a zigzag split"
    base, extra = divmod(tokens, 2 * ranks)
    size = [base + (i < extra) for i in range(2 * ranks)]
    return max(size[r] + size[-1 - r] for r in range(ranks))

def most_pages(first: int, stop: int, ranks: int) -> int:
    "Pages of the busiest owner among page indices first ... stop - 1, dealt in turn"
    count = [0] * ranks
    for p in range(first, stop): count[p % ranks] += 1
    return max(count)

@pytest.mark.parametrize("history,chunk,cp", [
    (0, 1, 2), (1, 1, 2), (63, 65, 3), (64, 64, 3), (65, 63, 4), (1000, 333, 3), (4095, 1024, 8),
    (4097, 1023, 8), (8 * 64 * 3, 8 * 64, 8), (8 * 64 * 3 + 1, 77, 8), (777, 1, 5)])
@pytest.mark.parametrize("fmt", ["fp8_packed", "bf16"])
def test_forecasts_are_the_exact_forms_filler_included(history, chunk, cp, fmt):
    case, row = find_case("glm-5", history, chunk, draft=False, cp=cp, format=fmt), ROW[fmt]
    moved = (cp - 1) * longest(chunk, cp) * row
    whole = -(-(history + chunk) // 64) * 64 * row
    def view(tokens): return (cp - 1) * most_pages(0, -(-tokens // 64), cp) * 64 * row
    said = {r.name: planned(case, r, cp - 1)["predicted"][0] for r in (*BASELINES, *RUNGS)}
    assert said["all_gather"] == said["replicated"] == moved
    assert said["full_view"] == moved + view(history + chunk)
    assert said["chunk_reuse"] == moved + view(history)
    assert said["layer_split"] == moved + whole * (cp > 1)
    for name in ("page_split", "compute_owner"):
        assert said[name] >= balanced_bytes("chunk_reuse", history, chunk, cp, row)

def test_the_view_holds_pages_once_per_owner_and_the_chunk_is_not_among_them():
    "History of one page more than even: one page of filler on seven of eight ranks"
    got = forecast("glm-5", history=128 * K + 64)["chunk_reuse"]
    assert got["predicted_bytes_per_layer"] == 96_022_528 + 7 * 64 * 788
    assert got["filler_ratio"] > 1


# -- what stands beside

def test_a_rank_keeps_an_eighth(glm5):
    whole = (128 * K + 8 * K) * 788 * 78
    for name in ("replicated", "all_gather"): assert glm5[name]["rest_bytes_per_rank"] == whole
    assert glm5["layer_split"]["rest_bytes_per_rank"] * 78 == whole * 10
    for name in ("full_view", "chunk_reuse", "page_split", "compute_owner"):
        assert glm5[name]["rest_bytes_per_rank"] * 8 == whole

def test_collectives_of_a_layer_are_counted(glm5):
    assert [glm5[r.name]["gathers_per_layer"] for r in RUNGS] == [2, 4, 4, 4, 4]
    cold = forecast("glm-5", history=0)
    assert [cold[r.name]["gathers_per_layer"] for r in RUNGS] == [2, 4, 2, 2, 2]

def test_tables_are_translated_once_a_forward_and_not_once_a_layer(glm5):
    assert {r["remaps_per_forward"] for r in glm5.values()} == {1}

def test_rows_are_written_directly_in_phase_5_alone(glm5):
    assert [n for n, r in glm5.items() if r["direct_write"]] == ["compute_owner"]

def test_output_is_one_row_of_each_rank_but_ours(glm5):
    assert {r["output_bytes_per_forward"] for r in glm5.values()} == {7 * 6144 * 4}

def test_scratch_is_one_view_and_the_gathered_chunk(glm5):
    "A view of the history and what the chunk needs beside it, no more than a page a rank above"
    view, chunk = (128 * K + 8 * K) * 788, 8 * K * 788
    most = {"all_gather": chunk, "full_view": view + chunk, "chunk_reuse": view + 2 * chunk}
    for name, size in most.items():
        assert size <= glm5[name]["scratch_bytes"] <= size + (2 + 8 + 1) * 64 * 788 + 1024, name

def test_a_draft_is_one_layer_more_with_an_indexer(glm5):
    got, per = run_ladder("glm-5", draft=True), (128 * K + 8 * K) * 788
    assert got["layers"] == 79 and got["indexers"] == 79
    for name, r in by_name(got).items():
        assert r["predicted_bytes_per_layer"] == glm5[name]["predicted_bytes_per_layer"]
    a, b = (rows["replicated"]["rest_bytes_per_rank"] for rows in (glm5, by_name(got)))
    assert b - a == per

def test_a_draft_of_a_model_that_shares_selections():
    case = find_case("glm-5.2", 64, 64, draft=True, cp=2, format="fp8_packed")
    assert planned(case, BASELINES[0], 0)["rest"] == [128 * (79 * 656 + 22 * 132)]


# -- capacity

@pytest.mark.parametrize("model,split", [("glm-5", 7.09), ("deepseek-v3.2", 6.78)])
def test_eight_times_the_tokens_and_at_least_7_9_net(model, split):
    got = forecast(model)
    assert got["replicated"]["capacity_ratio_pool"] == got["replicated"]["capacity_ratio_net"] == 1
    assert got["layer_split"]["capacity_ratio_net"] == got["layer_split"]["capacity_ratio_pool"]
    for r in RUNGS[1:]:
        assert got[r.name]["capacity_ratio_pool"] == 8
        assert 7.9 <= got[r.name]["capacity_ratio_net"] < 8
    assert round(got["layer_split"]["capacity_ratio_pool"], 2) == split

def test_net_is_what_scratch_leaves():
    "At 1M one view is 0.84 GB of 28.1"
    got, budget = forecast("glm-5", history=M), 26.2 * 2**30
    for name in ("full_view", "chunk_reuse"):
        s, s0 = got[name]["scratch_bytes"], got["replicated"]["scratch_bytes"]
        want = 8 * (budget - s) / (budget - s0)
        assert got[name]["capacity_ratio_net"] == pytest.approx(want, 2e-3)
        assert 7.7 < got[name]["capacity_ratio_net"] < 7.9

def test_more_scratch_than_budget_is_no_capacity_and_no_error():
    case = find_case("glm-5", 0, 64, draft=False, cp=2, format="fp32")
    seen = [rank | dict(scratch=1 << 36) for rank in rehearse(case, RUNGS[1])]
    base = rehearse(case, BASELINES[0])
    assert ladder.row_of(case, RUNGS[1], seen, base)["capacity_ratio_net"] == 0
    with pytest.raises(InputError, match="leaves no cache"):
        ladder.row_of(case, RUNGS[1], seen, seen)


# -- runs

@pytest.mark.parametrize("cp,history,chunk,draft,fmt", [
    (2, 300, 130, False, "fp8_packed"), (3, 192, 64, True, "bf16"), (1, 65, 1, False, "fp32")])
def test_a_run_is_what_its_rehearsal_said_and_what_the_oracle_says(cp, history, chunk, draft, fmt):
    same = dict(draft=draft, cp=cp, format=fmt)
    got = run_ladder(history=history, chunk=chunk, backend="local", **same)
    case = find_case("tiny", history, chunk, **same)
    assert got["ok"]
    base = rehearse(case, BASELINES[0])
    for rung, row in zip((*BASELINES, *RUNGS), got["baselines"] + got["rows"]):
        assert row["measured"] and row["max_abs_diff"] == 0.0
        assert row["received_bytes_per_layer"] == row["predicted_bytes_per_layer"]
        said = ladder.row_of(case, rung, rehearse(case, rung), base)
        differ = {k for k in said if said[k] != row[k]}
        assert differ == {"received_bytes_per_layer", "max_abs_diff", "measured"}, rung.name

def test_processes_say_the_same():
    got = run_ladder(cp=2, history=200, chunk=130)
    local = run_ladder(cp=2, history=200, chunk=130, backend="local")
    assert got == local and got["ok"] and all(r["measured"] for r in got["rows"])

def test_a_checkpoint_runs_with_its_draft_layer(tmp_path):
    raw = TINY | dict(num_nextn_predict_layers=1)
    c = parse_config(TINY)
    save_checkpoint(tmp_path, raw, random_weights(c, 1) | random_nextn(c, 1))
    got = run_ladder(str(tmp_path), draft=True, cp=2, history=64, chunk=64, backend="local")
    assert got["ok"] and got["layers"] == 5 and all(r["measured"] for r in got["rows"])

def test_a_directory_without_weights_is_a_forecast(tmp_path):
    (tmp_path/"config.json").write_text(json.dumps(TINY))
    got = run_ladder(str(tmp_path), cp=2, history=64, chunk=64)
    assert got["ok"] and not any(r["measured"] for r in got["rows"])
    assert {r["max_abs_diff"] for r in got["rows"]} == {None}

def small(**more): return run_ladder(cp=2, history=64, chunk=64, backend="local", **more)

def test_other_logits_are_not_ok(monkeypatch):
    real = ladder.alone
    monkeypatch.setattr(ladder, "alone", lambda *a: real(*a) + 1e-6)
    got = small()
    assert not got["ok"] and all(r["max_abs_diff"] > 0 and not r["ok"] for r in got["rows"])

def test_logits_that_are_no_numbers_are_not_ok(monkeypatch):
    monkeypatch.setattr(ladder, "alone", lambda *a: torch.full((256,), torch.nan))
    assert not small()["ok"]

def test_a_forecast_that_is_wrong_in_any_layer_is_not_ok(monkeypatch):
    from cpkv.shared_kv import ChunkReuse
    real = ChunkReuse.layer_bytes
    def lies(self, plan, layer, *more): return real(self, plan, layer, *more) + (layer == 2)
    monkeypatch.setattr(ChunkReuse, "layer_bytes", lies)     # layer 2 has no indexer
    got = small()
    assert not got["ok"] and [r["name"] for r in got["rows"] if not r["ok"]] == [
        "chunk_reuse", "page_split", "compute_owner"]


# -- the program

def call(capsys, *argv) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    got = capsys.readouterr()
    return code, got.out, got.err

@pytest.mark.parametrize("model", ["glm-5", "glm-5.2", "deepseek-v3.2"])
def test_json_has_what_was_promised(capsys, model):
    code, out, err = call(capsys, "ladder", "--model", model, "--json", "-")
    doc = json.loads(out)
    assert (code, err, doc["ok"], doc["command"]) == (0, "", True, "ladder")
    assert doc["config"] == dict(model=model, draft=False, cp=8, history=131072, chunk=8192,
                                 format="fp8_packed")
    assert [r["phase"] for r in doc["rows"]] == [1, 2, 3, 4, 5]
    assert [r["name"] for r in doc["baselines"]] == ["replicated", "layer_split"]
    for r in doc["rows"] + doc["baselines"]:
        assert KEYS <= set(r) and r["exposed_ms"] is None and r["measured"] is False
        assert r["received_bytes_per_layer"] is None and r["max_abs_diff"] is None
        assert all(r[k] >= 0 for k in KEYS if isinstance(r[k], int | float))

def test_the_table_fits_a_terminal_and_names_every_row(capsys):
    code, out, _ = call(capsys, "ladder", "--model", "glm-5", "--history", M, "--draft")
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    words = out.split()
    for rung in (*RUNGS, *BASELINES): assert words.count(rung.name) == 2
    assert "79 layers" in out and "728,641,536" in out

def test_a_result_that_differs_is_exit_1_and_one_line(capsys, monkeypatch):
    real = ladder.alone
    monkeypatch.setattr(ladder, "alone", lambda *a: real(*a) + 1)
    local = ladder.run_ranks
    monkeypatch.setattr(ladder, "run_ranks", lambda *a, **kw: local(*a, backend="local", **kw))
    words = "ladder --cp 2 --history 64 --chunk 64".split()
    code, out, err = call(capsys, *words)
    assert code == 1 and "DIFFER" in out and err.count("\n") == 1 and "logits" in err

@pytest.mark.parametrize("value", ["1", "trace"])
def test_no_row_is_taken_under_debug(monkeypatch, value):
    monkeypatch.setenv("CPKV_DEBUG", value)
    for model in ("tiny", "glm-5"):
        with pytest.raises(ConfigError, match="CPKV_DEBUG off"): run_ladder(model)

@pytest.mark.parametrize("sizes,said", [
    (dict(cp=0), "cp must be"), (dict(cp=1025), "cp must be"), (dict(chunk=0), "chunk must be"),
    (dict(chunk=(1 << 24) + 1), "chunk must be"), (dict(history=-1), "history must be"),
    (dict(history=1 << 24), "history must be"), (dict(history=1 << 23, chunk=1), "more than 16384"),
     (dict(format="int4"), "no format")])
def test_sizes_that_no_plan_can_have(sizes, said):
    with pytest.raises(InputError, match=said): run_ladder("glm-5", **sizes)

def test_what_this_machine_cannot_hold_is_refused_before_a_process(monkeypatch):
    monkeypatch.setattr(ladder, "run_ranks", None)
    with pytest.raises(CapacityError, match="this machine has"):
        run_ladder(cp=1024, history=16_000_000)


# -- the picture

def test_the_picture_is_the_same_every_time_and_says_all_in_words():
    a, b = (ladder.draw_ladder(run_ladder("glm-5", history=4096, chunk=1024)) for _ in range(2))
    assert a == b and all(r.name in repr(a) for r in itertools.chain(RUNGS, BASELINES))
    assert "currentColor" in a._repr_html_()

def test_the_front_page_shows_what_the_ladder_says_now():
    cells = json.loads((ROOT/"nbs"/"index.ipynb").read_text(encoding="utf-8"))["cells"]
    [cell] = [c for c in cells if "draw_ladder(" in "".join(c["source"])]
    [out] = cell["outputs"]
    shown = "".join(out["data"]["text/html"])
    assert shown == ladder.draw_ladder(run_ladder("glm-5"))._repr_html_(), "run nbs/index.ipynb"
    assert "<!-- ladder -->" in (ROOT/"docs"/"index.md").read_text(encoding="utf-8")
