"""The table of options: a row each, with a default that may be given, and a refusal for the rest"""
import os
import threading

import pytest

from cpkv.laws import InputError
from cpkv.options import MOST, OPTIONS, check_json_path, check_together, check_value, knobs_table

IDS = [f"{o.command} {o.said}" for o in OPTIONS]

def test_no_option_stands_twice_and_each_says_what_it_is():
    keys = [(o.command, o.key) for o in OPTIONS]
    assert len(set(keys)) == len(keys) and all(o.help and (o.unset or o.default is not None) for o in OPTIONS)

@pytest.mark.parametrize("o", OPTIONS, ids=IDS)
def test_defaults_and_choices_are_taken_and_what_comes_later_is_not(o):
    for value in (o.default, *o.choices): check_value(o, value)
    for value in o.later if isinstance(o.later, dict) else ("1",) if o.later else ():
        with pytest.raises(InputError, match="comes with"): check_value(o, value)

@pytest.mark.parametrize("o", [o for o in OPTIONS if o.kind is int and not o.later], ids=str)
def test_numbers_have_two_ends(o):
    for value in (o.least, o.most): check_value(o, value)
    for value in (o.least - 1, o.most + 1):
        with pytest.raises(InputError, match="must be at"): check_value(o, value)
    assert f"`{o.said}` | " in knobs_table() and f" | {o.least} to {o.most} | " in knobs_table()

def option(command, name): return next(o for o in OPTIONS if (o.command, o.name) == (command, name))

def test_a_host_tier_may_be_larger_than_an_integer_of_32_bits():
    for value in (MOST + 1, 100 << 30, 2**50): check_value(option("demo", "host-bytes"), value)

def test_a_limit_of_the_ladder_is_its_options():
    from cpkv.rehearse import find_case
    cp, history, chunk = (option("ladder", n) for n in ("cp", "history", "chunk"))
    for known in (dict(cp=cp.most), dict(history=history.most, chunk=1025), dict(chunk=chunk.most, history=0)):
        case = dict(cp=2, history=0, chunk=1) | known
        try: find_case("glm-5", case["history"], case["chunk"], draft=False, cp=case["cp"], format="fp8")
        except InputError as e: assert "history must be 0 to" in str(e)  # of both together

@pytest.mark.parametrize("given,config,path", [({"seed", "model"}, {}, None), (set(), {"file": "a/../b"}, "b"),
                                               (set(), {"trace": "b"}, "./b")])
def test_options_that_contradict_each_other(given, config, path):
    with pytest.raises(InputError): check_together(given, config, path)
    check_together(given - {"seed"}, config, path and path + "2")

def test_events_are_no_text_and_no_result(tmp_path):
    with pytest.raises(InputError, match="overwrite the events"): check_together(set(), {}, "t", "./t")
    with pytest.raises(InputError, match="add events to --file"): check_together(set(), {"file": "t"}, None, "./t")
    link = tmp_path/"link"
    link.symlink_to(tmp_path/"t")
    with pytest.raises(InputError): check_together(set(), {}, str(link), str(tmp_path/"t"))
    for config, path, events in (({"file": "a"}, "b", "c"), ({"file": None}, None, "c"), ({}, "-", "c"), ({}, None, None)):
        check_together(set(), config, path, events)

# -- where the result goes

def test_a_place_for_the_result_is_left_as_it_was(tmp_path):
    kept, new, link = tmp_path/"kept", tmp_path/"new", tmp_path/"link"
    kept.write_bytes(b"{}")
    link.symlink_to(tmp_path/"target")
    for p in (kept, new, link, "-", None): check_json_path(p and str(p))
    assert sorted(os.listdir(tmp_path)) == ["kept", "link"] and kept.read_bytes() == b"{}"

@pytest.mark.parametrize("path,why", [
    ("/proc/x", "No such file"), ("/dev/full", "No space left"), (".", "Is a directory"), ("", "No such|directory"),
    ("no/such/x", "No such file"), ("here/x", "Not a directory"), ("x" * 300, "too long")])
def test_a_place_that_takes_no_result_is_refused_with_its_reason(tmp_path, monkeypatch, path, why):
    if path.startswith("/") and not os.path.exists(os.path.dirname(path)): pytest.skip("no such system")
    monkeypatch.chdir(tmp_path)
    (tmp_path/"here").touch()
    with pytest.raises(InputError, match=f"cannot write --json .*reason=.*({why})"): check_json_path(path)
    assert os.listdir() == ["here"]

def test_a_pipe_is_not_opened_before_there_is_something_to_say(tmp_path):
    os.mkfifo(tmp_path/"p")
    t = threading.Thread(target=check_json_path, args=(str(tmp_path/"p"),), daemon=True)
    t.start()
    t.join(10)
    assert not t.is_alive()
