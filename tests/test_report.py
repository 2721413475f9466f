"""What people read is made from the result, fits a terminal, and says where something is wrong"""
import pytest

from cpkv.ladder import run_ladder
from cpkv.report import columns, show_bench, show_doctor, show_ladder, wrong_demo, wrong_doctor, wrong_ladder

def test_columns_stand():
    assert columns([("a", "bb"), (1234, "x")]) == "a      bb\n1,234   x"

@pytest.mark.parametrize("model", ["glm-5", "deepseek-v3.2"])
def test_a_ladder_fits_a_terminal_and_a_dash_is_what_was_not_measured(model):
    r = run_ladder(model)
    lines = show_ladder(r).split("\n")
    assert max(map(len, lines)) <= 80
    assert all(" - " in line for line in lines[1:len(r["rows"]) + len(r["baselines"]) + 1])

def test_a_row_that_is_wrong_is_named_with_what_is_wrong_of_it():
    r = run_ladder(cp=2, history=100, chunk=40, backend="local")
    assert r["ok"]
    r["rows"][2] |= dict(ok=False, max_abs_diff=1.0)
    assert wrong_ladder(r) == f"{r['rows'][2]['name']} is not what it should be: logits"

def test_units_stand_beside_their_values():
    said = show_bench(dict(ok=True, match_us=2.5, backup_gb_s=5.0, insert_ms=1.0))
    rows = [line.split() for line in said.split("\n")]
    assert rows == [["what", "value", "unit"], ["match", "2.5", "us"], ["backup", "5", "GB/s"], ["insert", "1", "ms"]]

def test_what_has_no_unit_keeps_its_name_so_no_name_stands_twice():
    said = show_bench(dict(ok=True, prefill_ratio=7.5, tokens=8192, prefill_s=1.5, backup_share=.8, match_mtok_s=2040.0))
    rows = [line.split() for line in said.split("\n")[1:]]
    assert rows == [["prefill_ratio", "7.5"], ["tokens", "8192"], ["prefill", "1.5", "s"], ["backup_share", "0.8"],
                    ["match", "2040", "Mtok/s"]]

def test_what_a_machine_lacks_stands_out():
    made = [dict(name=n, ok=ok, required=need, found="x", hint="") for n, ok, need in
            (("a", True, True), ("b", False, True), ("c", False, False))]
    assert [line.split()[0] for line in show_doctor(dict(checks=made)).split("\n")] == ["ok", "WRONG", "absent"]
    assert wrong_doctor(dict(checks=made)) == "wrong here: b (x)"

def test_leaked_pages_are_said_if_no_turn_differs():
    assert wrong_demo(dict(turns=[], leaked_pages=2)) == "2 pages leaked"
