"""Laws of the interface: handles, agreements, the world of one rank"""
import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cpkv.world as W
from cpkv.laws import ConfigError, OrderError
from cpkv.world import Handle, Solo

def test_handle_finishes_once_and_keeps_its_error():
    calls = []
    h = Handle(lambda: calls.append(1) or torch.ones(2))
    assert h.wait() is h.wait() and calls == [1]
    def bad(): calls.append(2); raise KeyError("gone")
    h = Handle(bad)
    for _ in range(3):
        with pytest.raises(KeyError, match="gone"): h.wait()
    assert calls == [1, 2]

@given(st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_say_ranks_names_every_rank_once(values):
    said = W.say_ranks([f"v{v}" for v in values])
    told = {}
    for group in said.split("v")[1:]:
        value, ranks = group.split(" on rank")
        told |= {int(r): int(value) for r in re.findall(r"\d+", ranks)}
    assert [told[r] for r in range(len(values))] == values
    assert said.count(" on ") == len(set(values))

def test_differences_show_key_values_and_ranks():
    facts = [{"a": "1", "b": "2"}, {"a": "1", "b": "3"}, {"a": "1"}]
    assert W.first_differences(facts) == "b is 2 on rank 0, 3 on rank 1, not set on rank 2"
    many = [{k: "0" for k in "abcde"}, {k: "1" for k in "abcde"}]
    assert W.first_differences(many).endswith("; and 2 more")

@pytest.mark.parametrize("value,on", [("", 0), ("0", 0), ("1", 1), ("trace", 1), ("trace:x", 1)])
def test_debug_is_read_from_the_ranks_own_environment(value, on, monkeypatch):
    assert Solo(env={"CPKV_DEBUG": value}).debug == bool(on)
    monkeypatch.setenv("CPKV_DEBUG", value)
    assert Solo().debug == bool(on) and not Solo(debug=False).debug and not Solo(env={}).debug

@pytest.mark.parametrize("value", ["yes", "2", "on", "tracefile"])
def test_an_unknown_debug_value_is_refused(value):
    with pytest.raises(ConfigError, match="CPKV_DEBUG"): Solo(env={"CPKV_DEBUG": value})

class Told(Solo):
    "One rank of several; what the others answer is written down beforehand"
    def __init__(self, *answers, **kwargs):
        super().__init__(**kwargs)
        self.size, self.answers = 2, list(answers)
    def _swap(self, entry, data): return [data, json.dumps(self.answers.pop(0)).encode()]

@given(st.lists(st.tuples(st.integers(), st.integers()), max_size=6))
def test_agreed_numbers_are_columns(pairs):
    mine, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    assert Told(theirs).agreed_min(mine) == [min(p) for p in pairs]
    assert Told(theirs).agreed_max(mine) == [max(p) for p in pairs]
    assert Solo().agreed_min(mine) == mine

def test_agreed_equal_names_both_texts():
    Told("4").agreed_equal("pages", "4")
    with pytest.raises(OrderError, match="pages is 4 on rank 0, 5 on rank 1"):
        Told("5").agreed_equal("pages", "4")

STARTS = {"config.page_size": "32", "config.ops": "triton", "env.CPKV_NVTX": "1", "debug": "on",
          "backend": "x", "version.torch": "0.1", "version.numpy": "0.1", "version.cpkv": "9",
          "version.python": "2.7"}

@pytest.mark.parametrize("key,value", STARTS.items())
def test_start_refuses_one_difference(key, value):
    config = {"page_size": 64, "ops": "ref"}
    facts = W.start_facts(Solo(env={}), config)
    with pytest.raises(ConfigError, match=rf"^{key} is .* on rank 0, {value} on rank 1$") as e:
        Told("other digest", facts | {key: value}, env={}).check_start(config)
    assert e.value.exit_code == 2

def test_start_agrees_with_itself_in_one_collective():
    w = Solo()
    w.check_start({"a": 1})
    assert [e.op for e in w.ledger.entries] == ["check_start"]

@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64),
                                 torch.zeros(1, 6)[:, ::2], torch.zeros(2, 3)])
def test_a_buffer_that_does_not_fit_is_refused_before_the_ledger(bad):
    w, x = Solo(), torch.zeros(3)
    with pytest.raises(ValueError, match="out must be"): w.all_gather(x, out=bad)
    with pytest.raises(ValueError, match="out must be"): w.broadcast(x, src=0, out=bad.int())
    with pytest.raises(ValueError, match="lane"): w.all_gather(x, lane="mian")
    with pytest.raises(ValueError, match="lane"): w.broadcast(x, src=0, lane="mian")
    for src in (-1, 1):
        with pytest.raises(ValueError, match="src must be"): w.broadcast(x, src=src)
    assert not w.ledger.entries and not w.pending

def test_solo_broadcasts_to_itself():
    w, x, out = Solo(), torch.arange(3), torch.full((3,), -1)
    h = w.broadcast(x, src=0, layer=2, out=out)
    x.zero_()
    assert h.wait() is out and out.tolist() == [0, 1, 2] and w.ledger.received() == {2: 0}
    assert [(e.op, e.src, e.shape) for e in w.ledger.entries] == [("broadcast", 0, (3,))]

def test_solo_gathers_a_copy():
    w, x = Solo(), torch.arange(3)
    h = w.all_gather(x, layer=2)
    x.zero_()
    assert h.wait().tolist() == [[0, 1, 2]] and w.ledger.received() == {2: 0}
