"""Copies that move when told do what the real ones do, on any schedule"""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.alloc import Holder
from cpkv.copies import Copies
from cpkv.copy_thread import ACK, CpuMover, Failed, Hold, Kind, probe_pools
from cpkv.host_pool import hash_pages
from cpkv.laws import CpkvError, ResidencyError, WaitTimeout
from cpkv.step import StepCopies, keep, put_back


class Beside:
    "The real copies and the stand-in, with the same pools and the same calls"
    def __init__(self):
        self.beds = [probe_pools(num_layers=2, local_pages=5, host_pages=5) for _ in range(2)]
        self.gate, self.begun, self.late = Hold(by_page=False), 0, []
        (pool, host), (pool2, host2) = self.beds
        self.real = Copies(pool, host, gate=self.gate, timeout=10)
        self.step = StepCopies(pool2, host2, CpuMover(pool2, host2))
        self.both = (self.real, self.step)
        self.head = {k: [] for k in Kind}  # not acked: [op id, moved]
        self.on_host = []

    def write(self, page):
        self._issue(Kind.WRITE, lambda c, op: c.backup(op, np.array([page])).tolist())

    def load(self, page):
        if self.on_host: self._issue(Kind.LOAD, lambda c, op: c.load(op, self.on_host[0], np.array([page])))

    def _issue(self, kind, call):
        op, self.begun = self.begun, self.begun + 1
        for at in ((op, 0), (op, ACK)): self.gate.hold(*at)
        out = []
        for c in self.both:
            try: out.append(call(c, op))
            except CpkvError as e: out.append(type(e))
        assert out[0] == out[1]
        if not isinstance(out[0], type): self.head[kind].append([op, False])

    def copy(self, kind, breaks=False):
        if not self.head[kind] or self.head[kind][0][1]: return
        op, t = self.head[kind][0][0], self.step._threads[kind]
        if breaks: self.gate.fail(ResidencyError("the copy broke"), op, 1, 0)
        self.gate.open(op, 0)
        self.gate.reached(op, ACK)
        while not (t.next().is_moved or breaks): t.step()
        if breaks:
            t.step()
            t.fail()
        self.head[kind][0][1] = True

    def ack(self, kind):
        if not self.head[kind] or not self.head[kind][0][1]: return
        op, _ = self.head[kind].pop(0)
        self.gate.open(op, ACK)
        t = self.real._threads[kind]
        with t.cond: assert t.cond.wait_for(lambda: any(o.op_id == op for o in t.acks), 10)
        assert self.step._threads[kind].step()

    def pop(self, kind, n):
        got = []
        for c in self.both:
            ready = c.ready_writes() if kind is Kind.WRITE else c.ready_loads()
            done = (c.pop_writes if kind is Kind.WRITE else c.pop_loads)(min(n, len(ready)))
            got.append([(type(d), d.op_id, d.device_pages.tolist(), d.host_pages.tolist()) for d in done])
            for d in done if kind is Kind.WRITE else ():
                if isinstance(d, Failed): c.host.drop(d.host_pages, Holder.TRANSFER)
                else:
                    c.host.keep(d.host_pages)
                    if c is self.real: self.on_host.append(d.host_pages)
        assert got[0] == got[1]

    def flush(self):
        drained = [c.drain(0) for c in self.both]
        assert drained[0] == drained[1]
        if not drained[0]: return
        ended = [[(f.op_id, f.kind) for f in c.flush()] for c in self.both]
        assert ended[0] == ended[1]
        self.on_host = []

    def said(self, c):
        failed = [[f.op_id for f in c.failed(k)] for k in Kind]
        host = c.host
        return (c.ready_writes(), c.ready_loads(), failed, len(c.claims), len(host.claims), c.num_late,
                c.generation, host.alloc.free_by_class, host._written.tolist(),
                hash_pages(c.device.buffers, np.arange(1, 5)))

CALLS = st.one_of(st.tuples(st.sampled_from(["write", "load"]), st.integers(1, 4)),
                  st.tuples(st.just("copy"), st.sampled_from(Kind), st.booleans()),
                  st.tuples(st.just("ack"), st.sampled_from(Kind)),
                  st.tuples(st.just("pop"), st.sampled_from(Kind), st.integers(0, 2)),
                  st.tuples(st.just("flush")))

@given(st.lists(CALLS, max_size=30))
def test_the_stand_in_does_what_the_copies_do(schedule):
    b = Beside()
    try:
        for name, *args in [("write", 1), ("copy", Kind.WRITE), *schedule]:
            getattr(b, name)(*args)
            assert b.said(b.real) == b.said(b.step)
    finally:
        for ops in b.head.values():
            for op, _ in ops:
                b.gate.open(op, 0)
                b.gate.open(op, ACK)
        b.real.close()

def test_who_waits_for_nothing_is_told_so():
    b = Beside()
    b.real.close()
    for kind in Kind:
        with pytest.raises(WaitTimeout): b.step._wait(kind, lambda: False, None)

class Slotted:
    __slots__ = ("x", "items")

class Plain: pass

@pytest.mark.parametrize("cls", [Plain, Slotted])
def test_what_was_kept_can_be_put_back_again_and_again(cls):
    o, fixed = cls(), np.arange(3)
    fixed.setflags(write=False)
    inner = {"a": [1, {2}], "b": np.zeros(2)}
    o.x, o.items = fixed, inner
    kept = keep(o)
    for _ in range(2):
        o.items["a"][1].add(3); o.items["b"][0] = 7; o.items["c"] = 1; o.x = None
        put_back(kept)
        assert o.x is fixed and o.items.keys() == {"a", "b"}
        assert o.items["a"] == [1, {2}] and o.items["b"].tolist() == [0, 0]
