"""The host tier: what is not whole on all ranks is seen by nobody, and what fails leaves no trace"""
import threading
import zlib
from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpkv.alloc import Holder, PageAllocator, cyclic_classes, pick_base
from cpkv.copies import Copies
from cpkv.copy_thread import ACK, Gate, Hold, Kind, probe_pools
from cpkv.hicache import Answer, HiCache, agreement_us
from cpkv.host_pool import HostPool
from cpkv.launch import run_ranks
from cpkv.laws import (ConfigError, ConservationError, InputError, LeaseError,
                       OrderError, OwnershipError, PeerError, ResidencyError, WaitTimeout)
from cpkv.nodes import NO_OP, NO_PAGES, Residency, Tier
from cpkv.payload import payload_of
from cpkv.radix import RadixTree
from cpkv.settle import COUNTERS
from cpkv.world import Solo

ABSENT, PENDING, READY = Residency
DEVICE, HOST = Tier
LAYERS = 3


class Steps(Gate):
    "Copies wait until they are let go; a test says which of them break, and where"
    by_page = True
    def __init__(self):
        self.cond, self.free, self.faults, self.is_open = threading.Condition(), set(), {}, False

    def let(self, *ops):
        with self.cond:
            self.free.update(ops)
            self.cond.notify_all()

    def open(self):
        self.is_open = True
        self.let()

    def step(self, op_id, layer, page):
        with self.cond:
            if not self.cond.wait_for(lambda: self.is_open or op_id in self.free, 20):
                raise WaitTimeout("nobody let this copy go", op=op_id)
            fault = self.faults.get((op_id, layer, page), self.faults.get((op_id, layer, None)))
        if fault is not None: raise fault


class Bed:
    "One rank with both tiers; a letter of a text is a page, and its bytes follow from what is before"
    def __init__(self, world=None, gate=None, device=9, host=9, checksums=False, form="layer_first", **kw):
        self.world, R = world or Solo(), world.size if world else 1
        self.pool, self.hostpool = probe_pools(self.world.rank, R, local_pages=device, host_pages=host, form=form)
        self.tree = RadixTree(2, namespace="test", pairs=True)
        self.alloc, self.gate = PageAllocator(self.pool.layout, device), gate or Gate()
        self.copies = Copies(self.pool, self.hostpool, gate=self.gate, timeout=10, checksums=checksums)
        self.h = HiCache(self.world, self.tree, self.alloc, self.copies, **kw)

    def __enter__(self): return self
    def __exit__(self, *_):
        if isinstance(self.gate, Steps): self.gate.open()
        self.copies.close()

    def key(self, text): return self.tree.key([x for c in text for x in (7, ord(c))] + [7])
    def match(self, text): return self.tree.match(self.key(text))

    def found(self, text):
        m = self.match(text)
        return len(m.pages), len(m.host_pages), m.join

    def want(self, text, i, buffer):
        "Bytes of page i of a text in one buffer"
        seed = zlib.crc32(f"{text[:i + 1]} {buffer.component} {buffer.layer}".encode())
        return np.random.default_rng(seed).integers(0, 256, buffer.pages.shape[1], np.uint8)

    def mine(self, pages):
        "(place in the text, local page) of this rank's"
        R = self.pool.layout.cp_size
        return [(i, int(p) // R) for i, p in enumerate(pages) if p % R == self.hostpool.rank]

    def fill(self, text, pages, first):
        for i, p in self.mine(pages):
            for b in self.pool.buffers:
                if len(b.pages): b.pages.numpy()[p] = self.want(text, first + i, b)

    def same(self, text, pages, first=0, buffers=None):
        "Do all components of this rank's pages say what the text says?"
        return all((b.pages.numpy()[p] == self.want(text, first + i, b)).all()
                   for i, p in self.mine(pages) for b in buffers or self.pool.buffers if len(b.pages))

    def step(self, world=None):
        return self.h.settle(self.world.agreed_min(self.h.vector()))

    def until_idle(self):
        "Steps until nothing moves; what ended"
        out = []
        while self.h.num_moving:
            self.copies.wait_op([*self.h.ops.live][-1])
            out += self.step().ended
        return out

    def put(self, text, write=True):
        "Compute what the device lacks, keep it, write it through; operation of the write"
        m = self.match(text)
        with self.tree.lease(m):
            base = m.base if m.base >= 0 else pick_base(self.alloc.free_by_class)
            classes = cyclic_classes(len(m.pages), len(text) - len(m.pages), base, self.pool.layout.cp_size)
            if not self.h.make_room(np.bincount(classes, minlength=self.pool.layout.cp_size)): return None
            [new] = self.alloc.take([classes])
            self.fill(text, new, len(m.pages))
            pages = np.concatenate([m.pages, new])
            got = self.tree.insert(self.key(text), pages, base)
            if got.declined: self.alloc.free(new)
            else:
                self.alloc.move(got.taken, Holder.REQUEST, Holder.TREE)
                self.alloc.free(got.duplicates)
        with self.tree.lease(self.match(text)) as leased: return self.h.written(leased) if write else NO_OP

    def store(self, text):
        "On both tiers"
        self.put(text)
        self.until_idle()

    def evict(self, n=99, tier=DEVICE):
        "Device pages, or host pages, from the coldest; no room is asked for"
        pages = self.tree.evict(n, tier)
        if tier is DEVICE: self.alloc.free(pages, Holder.TREE)
        else: self.hostpool.drop(pages)
        return len(pages)

    @contextmanager
    def request(self, text, request=0):
        "A match under its lease, and what it heard of the host's part"
        with self.tree.lease(self.match(text)) as m, self.h.load(m, request) as load: yield m, load

    def read(self, text, m, load):
        "A forward: every layer after its wait; True if what it read was right"
        for layer in range(LAYERS):
            self.h.wait_layer([load.op], layer)
            here = [b for b in self.pool.buffers if b.layer == layer]
            good = self.same(text, np.concatenate([m.pages, load.pages]), 0, here)
            if not good: break
        failed = self.h.verdict([load.op])
        assert good or failed
        if not failed: self.h.count_hits(len(m.pages), len(load.pages))
        return not failed

    def check(self, texts=()):
        self.h.check()
        assert self.h._broken.keys() <= self.h.ops.live.keys()
        for text in texts:
            m = self.match(text)
            assert self.same(text, m.pages) and self.same(text, m.host_pages, len(m.pages), self.hostpool.buffers)

    def books(self):
        "Everything that a refusal may not change"
        return (self.tree.digest(), self.alloc.free_by_class, self.hostpool.alloc.free_by_class,
                len(self.copies.claims), len(self.hostpool.claims), self.h.num_moving, self.h._joined)


def on(ranks, fn, *args, **kw):
    return run_ranks(lambda peers, *args: fn(peers.world(), *args), ranks, *args, backend="local", timeout=30, **kw)

@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("cpkv-")] == []


# -- one prefix, down and up

@pytest.mark.parametrize("form", ["layer_first", "page_first"])
@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("R", [1, 2, 3])
def test_all_components_come_back_as_they_went(form, n, R):          # traps 44, 45; cases 30, 46, 72
    text = "abcdefgh"[:n]
    def rank(world):
        with Bed(world, form=form, checksums=True) as b:
            b.store(text)
            assert b.found(text) == (n, 0, NO_OP)
            assert b.evict() == n and b.found(text) == (0, n, NO_OP)
            b.pool.poison(range(9))
            with b.request(text) as (m, load):
                assert load.answer is Answer.BEGAN and b.read(text, m, load)
            assert b.found(text) == (n, 0, NO_OP) and b.h.num_moving == 0
            b.check([text])
            return b.h.counters
    said = on(R, rank)
    assert all(c == said[0] for c in said)
    assert [said[0][k] for k in ("written", "loaded", "hit_host", "hit_device")] == [n, n, n, 0]

def test_an_empty_match_and_a_text_that_nobody_knows():
    with Bed() as b:
        for text in ("", "zz"):
            with b.request(text) as (m, load):
                assert load == (Answer.NOTHING, NO_OP, NO_PAGES) and not len(m.pages)
                assert b.h.written(m) == NO_OP
        assert b.h.verdict([]) == b.h.verdict([NO_OP]) == [] and b.h.wait_layer([], 0) is None
        assert b.step().ended == [] and set(b.h.counters.values()) == {0}

def test_a_copy_is_seen_after_the_ack_of_every_rank_and_not_before():  # traps 36, 41; case 12
    def rank(world):
        gate = Steps()
        with Bed(world, gate) as b:
            op = b.put("ab")
            if world.rank != 1:
                gate.let(op)
                b.copies.wait_op(op)
            for _ in range(3): assert b.step().ended == []
            assert b.evict() == 0 and b.found("ab") == (2, 0, NO_OP) and b.tree.pages(HOST).size == 0
            gate.let(op)
            b.copies.wait_op(op)
            [end] = b.step().ended
            assert (end.op, end.kind, end.is_whole, end.requests) == (op, Kind.WRITE, True, ())
            assert b.evict() == 2 and b.found("ab") == (0, 2, NO_OP)
            b.check(["ab"])
            return [str(e) for e in world.ledger.entries]
    ledgers = on(3, rank)
    assert ledgers[0] == ledgers[1] == ledgers[2]

@pytest.mark.parametrize("at", [1, 2, 3])
def test_both_parts_of_a_split_are_published_and_none_is_lost(at):    # traps 37, 38, 43; case 35
    gate = Steps()
    with Bed(gate=gate) as b:
        op = b.put("abcd")
        b.put("abcd"[:at] + "xy", write=False)                        # splits what is on its way
        assert b.evict() == 2 and b.evict(99, HOST) == 0              # source and target stay
        gate.open()
        b.until_idle()
        assert b.tree.num_ready == [4, 4] and b.tree.num_locked == 0 and op == 0
        b.evict()
        with b.request("abcd") as (m, load): assert b.read("abcd", m, load)
        b.check(["abcd"])

def test_host_pages_are_not_given_up_while_a_load_reads_them():       # trap 38
    gate = Steps()
    with Bed(gate=gate, host=5) as b:
        gate.let(0)
        b.store("abc")
        b.evict()
        b.put("xyz", write=False)
        with b.request("abc"):
            with b.tree.lease(b.match("xyz")) as m: assert b.h.written(m) == NO_OP
            assert b.evict(99, HOST) == 0 and b.h.counters["no_room_writes"] == 1
            b.check(["abc", "xyz"])
        gate.open()
        b.until_idle()
        with b.tree.lease(b.match("xyz")) as m: assert b.h.written(m) != NO_OP
        b.until_idle()
        b.check(["abc", "xyz"])
        assert b.tree.num_ready[HOST] == 4 and b.h.counters["evicted_host"] == 2


# -- joining

def test_a_second_request_joins_and_neither_sees_the_page_before_the_layer():   # case 22
    gate = Steps()
    with Bed(gate=gate) as b:
        gate.let(0)
        b.store("abcd")
        b.evict()
        b.pool.poison(range(9))
        with b.request("abcd", 1) as (m1, one), b.request("abx", 2) as (m2, two):
            assert (one.answer, two.answer) == (Answer.BEGAN, Answer.JOINED) and one.op == two.op
            assert two.pages.tolist() == one.pages[:2].tolist() and b.found("abcd") == (0, 0, one.op)
            gate.open()
            assert b.read("abcd", m1, one) and b.same("ab", two.pages)
            assert b.h.verdict([two.op]) == [] and b.evict() == 0
            b.h.count_hits(len(m2.pages), len(two.pages))
        assert [b.h.counters[k] for k in ("hit_host", "loaded")] == [6, 4]
        b.check(["abcd"])
        assert b.evict() == 4

def test_two_that_matched_before_either_asked_make_one_load():
    with Bed() as b:
        b.store("abcd")
        b.evict()
        with b.tree.lease(b.match("abcd")) as m1, b.tree.lease(b.match("abc")) as m2:
            with b.h.load(m1, 1) as one, b.h.load(m2, 2) as two:
                assert (one.answer, two.answer, one.op) == (Answer.BEGAN, Answer.JOINED, two.op)
                assert b.read("abcd", m1, one) and b.same("abc", two.pages)
        assert b.tree.num_locked == 0
        b.check(["abcd"])

def test_a_longer_path_waits_and_then_loads_the_rest():
    gate = Steps()
    with Bed(gate=gate) as b:
        gate.let(0)
        b.store("abcde")
        b.evict(4)
        with b.request("abc", 1) as (m1, one):
            with b.request("abcde", 2) as (m2, two):
                assert two == (Answer.WAIT, NO_OP, NO_PAGES) and len(m2.pages) == 1
            gate.open()
            assert b.read("abc", m1, one)
        with b.request("abcde", 2) as (m2, two):
            assert (len(m2.pages), two.answer, len(two.pages)) == (3, Answer.BEGAN, 2)
            assert b.read("abcde", m2, two)
        assert [b.h.counters[k] for k in ("hit_device", "hit_host", "waits")] == [1 + 3, 2 + 2, 1]
        b.check(["abcde"])

def test_a_match_that_the_device_has_overtaken_is_asked_again():
    with Bed() as b:
        b.store("ab")
        b.evict()
        with b.tree.lease(b.match("ab")) as old:
            with b.request("ab") as (m, load): assert b.read("ab", m, load)
            with b.h.load(old, 3) as late: assert late.answer is Answer.WAIT

@pytest.mark.parametrize("R", [1, 2, 3])
@pytest.mark.parametrize("at", [(0, 0), (1, 0), (2, 1), (ACK, 0)])
@pytest.mark.parametrize("by", ["verdict", "settle"])
def test_a_load_that_fails_on_one_rank_fails_on_all_and_every_joiner_is_named(R, at, by):
    def rank(world):
        gate = Steps()
        with Bed(world, gate) as b:
            gate.let(0)
            b.store("abcdef")
            b.evict()
            if world.rank == R - 1: gate.faults[1, at[0], None] = OSError("broken")
            before = b.alloc.free_by_class
            with b.request("abcdef", 1) as (m1, one), b.request("abcd", 2) as (_, two):
                gate.open()
                mark = world.ledger.mark()
                if by == "verdict":
                    for layer in range(LAYERS): b.h.wait_layer([one.op, two.op], layer)  # never raises
                    failed = b.h.verdict([one.op, two.op])
                    assert len(world.ledger.since(mark).entries) == 1
                else: failed = [e for e in b.until_idle() if not e.is_whole]
                [end] = failed
                assert (end.op, end.kind, end.requests) == (1, Kind.LOAD, (1, 2))
                assert b.alloc.free_by_class == before and b.alloc.count(Holder.TRANSFER) == [0] * R
                b.check(["abcdef"])
            with b.request("abcdef", 1) as (_, again): assert again.answer is Answer.NOTHING
            b.step()
            assert b.found("abcdef") == (0, 0, NO_OP)   # what could not be read is forgotten
            assert b.h.counters["failed_loads"] == 1 and b.h.counters["hit_host"] == 0
            b.store("abcdef")
            b.check(["abcdef"])
            return [str(e) for e in world.ledger.entries]
    ledgers = on(R, rank)
    assert all(x == ledgers[0] for x in ledgers)

@pytest.mark.parametrize("bad", range(6))
@pytest.mark.parametrize("R", [1, 2, 3])
def test_only_the_leading_run_that_all_ranks_can_read_is_used(R, bad):     # cases 9, 22, 71; trap 48
    text = "abcdef"
    def rank(world):
        with Bed(world, checksums=True) as b:
            b.store(text)
            b.evict()
            page = int(b.match(text).host_pages[bad])
            if page % R == world.rank: b.hostpool.buffers[-1].pages[page // R] ^= 1  # the draft's index
            with b.request(text, 1) as (m, load):
                b.read(text, m, load)
                assert b.h.counters["failed_loads"] == 1
            with b.request(text, 1) as (m, load):
                assert len(load.pages) == bad and (bad == 0 or b.read(text, m, load))
            b.step()
            assert b.found(text) == (bad, 0, NO_OP) and sum(b.hostpool.alloc.count(Holder.TREE)) == bad
            b.check([text])
    on(R, rank)

def test_a_request_that_goes_away_leaves_its_load_to_the_tree():           # case 41
    gate = Steps()
    with Bed(gate=gate, host=17) as b:
        gate.let(0)
        b.store("abcd")
        for i in range(20):
            b.evict()
            op = b.h.ops.next_op
            if i % 4 == 1: gate.faults[op, 0, None] = OSError("broken")
            with b.request("abcd", i) as (m, load):
                if i % 4 == 2: gate.let(op)                                # done, not yet seen
                if i % 4 == 3:
                    gate.let(op)
                    assert b.read("abcd", m, load)
            gate.let(op, op + 1)
            ends = b.until_idle()
            assert all(e.requests == () for e in ends)
            b.step()
            if i % 4 == 1:
                gate.let(op + 1)
                b.store("abcd")
            b.check(["abcd"])
        assert b.h.counters["hit_host"] == 5 * 4
        b.h.reset()
        assert b.hostpool.alloc.free_by_class == [16]


# -- writes

def test_after_hits_counts_leases():
    with Bed(after_hits=2) as b:
        assert b.put("ab") == NO_OP
        assert b.put("abcd") != NO_OP     # the new part has one, the old part two
        b.until_idle()
        assert [len(n.pages[HOST]) for n in b.tree.nodes()] == [2, 0]
        b.store("abcd")
        assert b.tree.num_ready == [4, 4]
        b.check(["abcd"])

def test_what_hangs_under_a_write_is_written_when_it_has_ended():        # case 34
    gate = Steps()
    with Bed(gate=gate) as b:
        assert b.put("ab") == 0
        assert b.put("abcd") == b.put("abxy") == NO_OP and b.h.num_moving == 1
        gate.open()
        b.until_idle()
        assert b.tree.num_ready == [6, 6] and b.h.ops.next_op == 3
        b.check(["abcd", "abxy"])

def test_a_node_that_went_meanwhile_is_not_written_later():
    gate = Steps()
    with Bed(gate=gate) as b:
        b.put("ab")
        b.put("abcd")
        assert b.evict() == 2
        gate.open()
        b.until_idle()
        assert b.tree.num_ready == [2, 2] and b.h.ops.next_op == 1
        b.check(["abcd"])

@pytest.mark.parametrize("at", [(0, 0), (2, 1), (ACK, 0)])
def test_a_write_that_fails_on_one_rank_is_gone_on_all_and_its_followers_are_not(at):
    def rank(world):
        gate = Steps()
        with Bed(world, gate, host=17) as b:
            if world.rank == 1: gate.faults[1, at[0], None] = OSError("broken")
            if world.rank == 2: gate.faults[2, at[0], None] = OSError("broken")
            for text in ("aaa", "bbb", "ccc", "ddd"): b.put(text)
            gate.open()
            ends = b.until_idle()
            assert [(e.op, e.is_whole) for e in ends] == [(0, True), (1, False), (2, False), (3, True)]
            assert b.hostpool.alloc.count(Holder.TRANSFER) == [0] * 3 and b.tree.num_locked == 0
            b.check(["aaa", "ddd"])
            b.evict()
            assert [b.found(t)[:2] for t in ("aaa", "bbb", "ccc", "ddd")] == [(0, 3), (0, 0), (0, 0), (0, 3)]
            assert b.h.counters["failed_writes"] == 2
    on(3, rank)

def test_a_host_smaller_than_the_device_has_no_dead_end():               # case 54
    with Bed(device=17, host=5) as b:
        texts = [f"{c}{c.upper()}{c}" for c in "abcdefghij"]
        for text in texts * 3:
            with b.request(text) as (m, load):
                if load.op != NO_OP: assert b.read(text, m, load)
            b.store(text)
            b.check(texts)
        assert b.h.counters["written"] > 10 and b.h.counters["evicted_host"] > 10

def test_a_text_longer_than_the_host_is_not_copied_and_never_half():     # cases 36, 54
    with Bed(host=3) as b:
        assert b.put("abc") == NO_OP and b.h.counters["no_room_writes"] == 1
        b.evict()
        assert b.found("abc") == (0, 0, NO_OP) and b.hostpool.alloc.free_by_class == [2]
        b.store("ab")
        assert b.put("abc") == NO_OP and b.tree.num_ready == [3, 2]      # not by dropping what is above it
        b.check(["abc"])

def test_the_wrong_leaf_is_not_evicted_from_the_host():                  # case 23
    with Bed() as b:
        for text in ("x", "xy", "xyz"): b.store(text)
        b.evict()
        assert b.evict(1, HOST) == 1
        with b.request("xyz") as (m, load):
            assert len(load.pages) == 2 and b.read("xyz", m, load)
        b.store("xyz")
        b.tree.drop(next(n for n in b.tree.nodes() if not n.children), DEVICE)
        b.alloc.free([p for p in range(1, 9) if b.alloc.holder_of(p) is Holder.TREE
                      and p not in b.tree.held[DEVICE]], Holder.TREE)
        assert b.evict(1, HOST) == 1 and b.found("xyz") == (2, 0, NO_OP)  # z, not y
        b.check(["xyz"])

@pytest.mark.parametrize("R", [1, 2])
def test_write_back_copies_what_goes_and_only_that(R):
    def rank(world):
        with Bed(world, policy="write_back") as b:
            b.put("abcd")
            b.put("abxyuv")
            mark = world.ledger.mark()
            assert b.h.make_room(b.alloc.free_by_class) and len(world.ledger.since(mark).entries) == 0
            assert b.h.make_room([6 + (R == 1)] * R) and len(world.ledger.since(mark).entries) == 1
            assert b.h.num_moving == 0 and b.h.counters["written"] >= b.h.counters["evicted_device"] > 0
            for text in ("abcd", "abxyuv"): assert sum(b.found(text)[:2]) == len(text)
            b.check(["abcd", "abxyuv"])
            with b.request("abcd") as (m, load): assert load.op == NO_OP or b.read("abcd", m, load)
            b.check(["abcd", "abxyuv"])
    on(R, rank)

def test_under_write_back_what_finds_no_room_is_dropped_and_never_taken_for_written():   # case 36
    with Bed(policy="write_back", device=9, host=4) as b:
        b.put("abc")
        b.put("xyz")
        assert b.h.make_room([8])
        assert b.found("abc") == (0, 0, NO_OP) and b.found("xyz") == (0, 3, NO_OP)   # the coldest is given up
        with b.request("xyz") as (m, load):                 # the host is full of what a load needs
            b.put("uvw")
            assert b.h.make_room([5]) and b.found("uvw")[:2] == (0, 0) and b.h.counters["no_room_writes"] == 2
            assert b.read("xyz", m, load)
        b.check(["abc", "xyz", "uvw"])

def test_a_write_back_that_fails_drops_the_node():
    gate = Steps()
    gate.open()
    with Bed(gate=gate, policy="write_back") as b:
        gate.faults[0, 1, None] = OSError("broken")
        b.put("abc")
        assert b.h.make_room([8]) and b.found("abc") == (0, 0, NO_OP)
        assert b.hostpool.alloc.free_by_class == [8] and b.h.counters["failed_writes"] == 1
        b.check(["abc"])


# -- room

def test_no_room_for_a_load_is_said_and_nothing_happens():
    with Bed(device=5) as b:
        b.store("abc")
        b.evict()
        b.put("xy", write=False)
        with b.tree.lease(b.match("xy")):
            before = b.books()[1:]
            with b.request("abc") as (m, load):
                assert load.answer is Answer.NO_ROOM and b.h.counters["no_room_loads"] == 1
            assert b.books()[1:] == before
        with b.request("abc") as (m, load):
            assert load.answer is Answer.BEGAN and b.read("abc", m, load)
        assert b.h.counters["evicted_device"] == 1
        b.check(["abc", "xy"])

def test_room_is_by_class_and_all_or_nothing():                          # traps 28, 51
    def rank(world):
        with Bed(world, device=3) as b:
            b.store("abc")                                     # three of four pages, one class full
            full = int(np.argmin(b.alloc.free_by_class))
            assert not b.h.make_room([3, 0]) and b.tree.num_ready == [3, 3]
            need = [0, 0]
            need[full] = 1
            with b.tree.lease(b.match("abc")): assert not b.h.make_room(need)
            assert b.h.make_room(need) and sum(b.found("abc")[:2]) == 3
            b.check(["abc"])
    on(2, rank)

@pytest.mark.parametrize("tier", ["device", "host"])
def test_a_rank_with_a_page_less_is_refused_at_start(tier):              # trap 39; case 12
    def rank(world):
        less = 9 - world.rank
        pool, host = probe_pools(world.rank, 2, **{"local_pages" if tier == "device" else "host_pages": less})
        tree = RadixTree(2, namespace="test", pairs=True)
        with Copies(pool, host) as copies:
            with pytest.raises(ConfigError, match=f"hicache.{tier}_pages is 9 on rank 0, 8 on rank 1"):
                HiCache(world, tree, PageAllocator(pool.layout, pool.local_pages), copies)
    on(2, rank)

@pytest.mark.parametrize("kw,error", [
    (dict(policy="write_never"), InputError), (dict(after_hits=0), InputError),
    (dict(tree=RadixTree(4, namespace="test", pairs=True)), ConfigError),
    (dict(tree=RadixTree(2, namespace="test")), ConfigError),             # a draft, and keys without it
    (dict(alloc=PageAllocator(probe_pools()[0].layout, 8)), ConfigError)])
def test_parts_that_do_not_fit_are_refused_at_start(kw, error):
    pool, host = probe_pools()
    parts = dict(tree=RadixTree(2, namespace="test", pairs=True),
                 alloc=PageAllocator(pool.layout, pool.local_pages)) | kw
    with Copies(pool, host) as copies, pytest.raises(error): HiCache(Solo(), copies=copies, **parts)


# -- failure after step k, for every k

STEPS = {"load": ["hostpool.check_written", "tree.coldest", "tree.give_back", "alloc.take", "h.ops.begin", "copies.load"],
         "write": ["tree.coldest", "hostpool.check_written", "tree.give_back", "hostpool.take", "h.ops.begin", "copies.write"],
         "evict": ["tree.coldest", "tree.give_back"],
         "write_back": ["hostpool.take", "h.ops.begin", "copies.write", "copies.wait_op", "copies.failed",
                        "world.agreed_min", "copies.pop_writes", "tree.give_back"],
         "verdict": ["copies.wait_op", "copies.failed", "world.agreed_min", "copies.pop_loads"],
         "settle": ["copies.ready_writes", "world.agreed_min", "copies.pop_writes", "copies.pop_loads"],
         "reset": ["copies.drain", "world.agreed_min"]}

def prepared(b, move, stack):
    "A move at a moment when it takes all of its steps"
    if move == "write_back":
        b.put("abc")
        return lambda: b.h.make_room([5])
    b.store("abc")
    if move == "evict": return lambda: b.h.make_room([7])
    if move == "write":
        b.store("xyz")
        b.put("uvw", write=False)
        leased = stack.enter_context(b.tree.lease(b.match("uvw")))
        return lambda: b.h.written(leased)
    if move != "reset": b.evict()
    b.put("xyz", write=move != "load")
    if move == "settle": stack.enter_context(b.request("abc"))
    if move != "load": b.copies.wait_op([*b.h.ops.live][-1])
    if move in ("settle", "reset"): return b.step if move == "settle" else b.h.reset
    if move == "load": b.put("uv", write=False)
    leased = stack.enter_context(b.tree.lease(b.match("abc")))
    load = b.h.load(leased, 1)
    if move == "load": return lambda: stack.enter_context(load)
    got = stack.enter_context(load)
    return lambda: b.h.verdict([got.op])

@pytest.mark.parametrize("move,step", [(m, step) for m, steps in STEPS.items() for step in steps])
def test_a_failure_at_any_step_leaves_books_that_add_up(monkeypatch, move, step):
    policy = "write_back" if move == "write_back" else "write_through"
    with Bed(device=8, host=7, policy=policy) as b, ExitStack() as stack:
        call, (*path, name) = prepared(b, move, stack), step.split(".")
        owner = b
        for x in path: owner = getattr(owner, x)
        before = b.books()[1:]
        with monkeypatch.context() as patch:
            def broken(*args, **kw): raise OSError(step)
            patch.setattr(owner, name, broken)
            with pytest.raises(OSError, match=step): call()
        b.h.check()
        if move != "write_back" and name not in ("begin", "take", "load", "write", "pop_loads"):
            assert b.books()[1:] == before    # those come after an eviction or the writes; here no effect yet
        stack.close()
        b.until_idle()
        assert b.alloc.count(Holder.REQUEST) == b.alloc.count(Holder.TRANSFER) == [0]
        assert b.tree.num_locked == 0 and len(b.copies.claims) == len(b.hostpool.claims) == 0
        b.check(["abc", "xyz", "uvw", "uv"])
        for text in ("abc", "xyz"): b.store(text)                     # and it goes on
        b.check(["abc", "xyz"])


# -- reset

def test_reset_leaves_nothing_on_the_host_and_late_acks_change_nothing():  # case 83
    def rank(world):
        gate = Hold(by_page=True)
        with Bed(world, gate) as b:
            b.store("abc")
            b.put("xyz")
            gate.reached(0, ACK)
            if world.rank == 1: gate.hold(2, ACK)                    # the ack is late on one rank
            b.put("uv")
            gate.reached(2, ACK)
            b.copies.drain()
            b.h.reset()
            assert b.hostpool.used_bytes() == 0 and b.tree.num_ready[HOST] == b.h.num_moving == 0
            gate.open(2, ACK)
            b.put("q", write=False)
            assert b.step().ended == [] and [b.found(t)[1] for t in ("abc", "xyz", "uv")] == [0, 0, 0]
            b.check(["abc", "xyz", "uv"])
            b.evict()
            assert b.found("uv") == (0, 0, NO_OP)
            b.store("abcd")                                          # pages of the flushed copies, again
            b.step()
            b.check(["abcd"])
            return len(b.h.tree.pages(HOST))
    assert on(2, rank) == [4, 4]

def test_after_a_reset_pages_are_trusted_again():
    gate = Steps()
    gate.open()
    with Bed(gate=gate) as b:
        b.store("abc")
        b.evict()
        gate.faults[1, 0, None] = OSError("broken")
        with b.request("abc") as (m, load): b.read("abc", m, load)
        b.h.reset()
        b.store("abc")                                               # on the same host pages
        b.evict()
        with b.request("abc") as (m, load): assert len(load.pages) == 3 and b.read("abc", m, load)
        b.check(["abc"])

@pytest.mark.parametrize("why", ["bytes", "load", "lease"])
def test_busy_on_one_rank_is_busy_on_all_and_nothing_happened(why):       # case 83
    def rank(world):
        gate = Steps()
        with Bed(world, gate) as b, ExitStack() as stack:
            gate.let(0)
            b.store("abc")
            if why == "bytes":
                op = b.put("xyz")
                if world.rank == 0: gate.let(op)
            else:
                b.evict()
                stack.enter_context(b.tree.lease(b.match("abc")))
                if why == "load": stack.enter_context(b.request("abc"))
            if world.rank == 0 and why == "bytes": b.copies.wait_op(op)
            before = b.books()
            with pytest.raises(LeaseError, match="busy"): b.h.reset()
            assert b.books() == before
            gate.open()
            b.until_idle()
            stack.close()
            b.h.reset()
            b.check(["abc", "xyz"])
    on(2, rank)


# -- ranks that differ, copies that never end, bytes that are not there

def test_one_vector_a_step_with_or_without_work():                        # trap 40; case 12
    def rank(world):
        with Bed(world) as b:
            b.step()
            mark = world.ledger.mark()
            b.step()
            b.put("ab")
            assert b.step().room == (min(b.alloc.free_by_class), min(b.hostpool.alloc.free_by_class))
            return [(e.op, e.shape) for e in world.ledger.since(mark).entries]
    assert on(3, rank) == [[("agreed_min", (8,))] * 2] * 3

@pytest.mark.parametrize("what", ["tree", "free"])
@pytest.mark.parametrize("R,odd", [(2, 1), (3, 0), (3, 2)])
def test_ranks_that_parted_are_named_with_the_node(R, odd, what):
    def rank(world):
        with Bed(world) as b:
            b.store("ab")
            b.store("abcd")
            node = [n.node_id for n in b.tree.nodes()][1]
            if world.rank == odd:
                if what == "tree":
                    with b.tree.lease(b.match("abcd")): pass
                else: b.alloc.take([[0]])
            mark = world.ledger.mark()
            with pytest.raises(OrderError) as e: b.step()
            assert [x.op for x in world.ledger.since(mark).entries] == ["agreed_min", "all_gather"]
            assert len(e.value.facts["digests"]) == R
            return e.value.facts["rank"], e.value.facts["node"], node
    for named, at, node in on(R, rank): assert named == odd and at in (0, node)

def test_the_node_is_named_where_only_a_node_differs():
    def rank(world):
        with Bed(world) as b:
            b.store("ab")
            b.store("abcd")
            node = [*b.tree.nodes()][1]
            if world.rank == 1:
                node.hits += 1
                b.tree.note(99)
            with pytest.raises(OrderError) as e: b.step()
            return e.value.facts["rank"], e.value.facts["node"] == node.node_id
    assert on(3, rank) == [(1, True)] * 3

@pytest.mark.parametrize("how", ["layer", "verdict"])
def test_a_copy_that_never_ends_ends_all_ranks_together(how):
    def rank(world):
        gate = Steps()
        with Bed(world, gate) as b:
            gate.let(0)
            b.store("ab")
            b.evict()
            if world.rank == 0: gate.let(1)
            b.copies.timeout, waits, wait = 0.05, [], b.copies.wait_layer
            b.copies.wait_layer = lambda op, layer: waits.append(layer) or wait(op, layer)
            with b.request("ab") as (m, load):
                if how == "layer":
                    for layer in range(LAYERS): b.h.wait_layer([load.op], layer)
                    assert waits == ([0] if world.rank == 1 else [0, 1, 2])   # one timeout, not one a layer
                    if world.rank == 1: gate.open()                       # too late for who has read
                with pytest.raises(WaitTimeout, match="on every rank"): b.h.verdict([load.op])
            b.copies.timeout = 10
            b.h.check()
            gate.open()
            b.until_idle()
    on(2, rank)

def test_a_copy_thread_that_is_gone_is_told_to_all_ranks():
    def rank(world):
        gate = Hold(by_page=True)
        with Bed(world, gate) as b:
            if world.rank == 1: gate.fail(SystemExit("gone"), 0, 0, 0)
            try: b.put("abc")
            except PeerError: assert world.rank == 1
            with pytest.raises(PeerError): b.copies.wait_op(0) if world.rank == 1 else b.step() or b.step()
            if world.rank == 1:
                with pytest.raises(PeerError, match="copy thread is gone"): b.step()
    on(2, rank)

@pytest.mark.parametrize("move", ["load", "evict"])
def test_a_payload_without_its_draft_is_refused_with_node_and_rank_before_anything_moves(move):   # traps 44, 47
    with Bed(host=5) as b:
        b.store("abc")
        [node], [*_, page] = b.tree.nodes(), b.tree.pages(HOST)
        other = HostPool(payload_of(b.pool, 0), 0, 10_000)
        b.hostpool._written[page] = other.payload.stamp(0)               # a writer that had no draft
        if move == "load": b.evict()
        else: b.put("xyz", write=False)
        before = b.books()[1:]
        with pytest.raises(ResidencyError, match="another payload") as e:
            if move == "load":
                with b.request("abc"): pass
            else:
                with b.tree.lease(b.match("xyz")) as m: b.h.written(m)
        assert (e.value.facts["node"], e.value.facts["rank"]) == (node.node_id, 0)
        assert b.books()[1:] == before
        b.h.check()

def test_a_copy_of_another_owner_is_refused():
    def rank(world):
        with Bed(world) as b:
            b.store("ab")
            b.evict()
            [n] = b.tree.nodes()
            before = b.alloc.free_by_class
            with b.tree.lease(b.match("ab")) as m:
                layout, b.h.host.layout = b.h.host.layout, OtherOwner(b.h.host.layout)
                with pytest.raises(OwnershipError), b.h.load(m, 0): pass
                b.h.host.layout = layout
            assert b.alloc.free_by_class == before and n.residency == [ABSENT, READY]
            b.check(["ab"])
    on(2, rank)

class OtherOwner:
    "A layout that is wrong about owners"
    def __init__(self, layout): self.layout = layout
    def __getattr__(self, name): return getattr(self.layout, name)
    def owner_of_page(self, page): return 1 - self.layout.owner_of_page(page)

def test_a_load_without_a_lease_is_refused():
    with Bed() as b:
        b.store("ab")
        with pytest.raises(LeaseError), b.h.load(b.match("ab"), 5): pass

@pytest.mark.parametrize("fault,error", [
    (lambda b: b.alloc.take([[0]]) and b.alloc.move([5], Holder.REQUEST, Holder.TREE), ConservationError),
    (lambda b: b.hostpool.take([5]), ConservationError),
    (lambda b: b.h._joined.update({7: {}}), LeaseError),
    (lambda b: b.h.ops.live.clear(), ResidencyError)])
def test_the_recount_finds_each_fault(fault, error):
    gate = Steps()
    with Bed(gate=gate) as b:
        b.put("abcd")
        b.h.check()
        fault(b)
        with pytest.raises(error): b.h.check()
        gate.open()

def on_processes(peers):
    "Down and up again on ranks that are processes; one of them breaks the second load"
    world, gate = peers.world(), Steps()
    with Bed(world, gate, checksums=True) as b:
        gate.open()
        b.store("abcde")
        b.evict()
        if world.rank == 1: gate.faults[2, 2, None] = OSError("broken")
        said = []
        for _ in range(2):
            with b.request("abcde") as (m, load): said.append(b.read("abcde", m, load))
            b.evict()
        b.check(["abcde"])
        return said, [str(e) for e in world.ledger.entries], b.tree.digest()

def test_ranks_that_are_processes_agree_alike():
    one, two = run_ranks(on_processes, 2, backend="gloo", timeout=30)
    assert one == two and one[0] == [True, False]


# -- what is told

def test_every_counter_is_there_from_the_start_and_tiers_are_told_apart():   # cases 62, 84
    with Bed() as b:
        assert b.h.counters == dict.fromkeys(COUNTERS, 0)
        b.put("abcd")
        b.until_idle()
        held = [tuple(b.tree.num_ready)]
        assert b.h.make_room([6])
        with b.request("abcd") as (m, load):          # 2 pages from each tier, told once a request
            assert (len(m.pages), len(load.pages)) == (2, 2) and b.read("abcd", m, load)
            for layer in range(LAYERS): b.h.wait_layer([load.op], layer)    # another chunk: nothing left
            assert b.h.verdict([load.op]) == []
        assert [b.h.counters[k] for k in ("hit_device", "hit_host")] == [2, 2]
        assert b.h.make_room([8])
        held.append(tuple(b.tree.num_ready))
        b.h.reset()
        held.append(tuple(b.tree.num_ready))
        assert held == [(4, 4), (0, 4), (0, 0)]
        assert [b.h.counters[k] for k in ("written", "loaded", "evicted_device", "evicted_host")] == [4, 2, 6, 4]
        assert "0 device and 0 host" in repr(b.h) and "evicted_host" in b.h._repr_html_()

def test_a_load_that_ended_is_an_event():
    def rank(world):
        world.trace.on = True
        with Bed(world) as b:
            b.store("abc")
            b.evict()
            with b.request("abc") as (m, load): b.read("abc", m, load)
            [e] = [e for e in world.trace.ring if e["kind"] == "publish"]
            return e["tokens"], e["classes"], e["op"]
    assert [x[0] for x in on(2, rank)] == [6, 6]

def test_the_budget_is_one_for_all_parts():                               # cases 16, 46
    with Bed(host=5) as b:
        for text in ("abc", "xyz", "uvw"):
            b.store(text)
            assert b.hostpool.storage.nbytes <= b.hostpool.host_bytes and b.hostpool.used_bytes() <= 4 * b.hostpool.page_bytes

def test_the_agreement_is_measured(): assert agreement_us(repeats=3) > 0


# -- any program

TEXTS = ["a", "ab", "abc", "abcd", "abxy", "x", "xyz", "xyabcd"]
ACTIONS = st.one_of(
    st.tuples(st.just("request"), st.sampled_from(TEXTS)), st.tuples(st.just("put"), st.sampled_from(TEXTS)),
    st.tuples(st.just("request"), st.sampled_from(TEXTS)), st.tuples(st.just("put"), st.sampled_from(TEXTS)),
    st.tuples(st.just("go"), st.integers(0, 2), st.integers(1, 3)), st.tuples(st.just("settle")),
    st.tuples(st.just("settle")), st.tuples(st.just("fail"), st.integers(0, 2), st.sampled_from([0, 1, 2, ACK])),
    st.tuples(st.just("forward")), st.tuples(st.just("abort"), st.integers(0, 3)),
    st.tuples(st.just("room"), st.integers(0, 9)), st.tuples(st.just("reset")))

class Machine:
    "One rank that runs a program"
    def __init__(self, b):
        self.b, self.gate, self.open, self.next_request = b, b.gate, {}, 0
        self.failed = set()

    def request(self, text):
        stack, b = ExitStack(), self.b
        self.let_write_back()
        m, load = stack.enter_context(b.request(text, self.next_request))
        assert not len(load.pages) or not np.isin(load.pages, b.tree.pages()).any() or load.op == NO_OP
        self.open[self.next_request] = stack, text, m, load
        self.next_request += 1

    def put(self, text):
        self.let_write_back()
        self.b.put(text)

    def let_write_back(self):
        "Room that is made by a copy waits for it"
        if self.b.h.policy == "write_back": self.gate.let(self.b.h.ops.next_op)

    def go(self, rank, n):
        if rank % self.b.world.size != self.b.world.rank: return
        todo = [op for op in self.b.h.ops.live if op not in self.gate.free][:n]
        self.gate.let(*todo)
        for op in todo: self.b.copies.wait_op(op)

    def fail(self, rank, layer):
        if rank % self.b.world.size == self.b.world.rank:
            self.gate.faults[self.b.h.ops.next_op, layer, None] = OSError("broken")

    def settle(self): self.requeue(self.b.step().failed)

    def requeue(self, ends):
        for end in ends:
            for r in end.requests: self.open.pop(r)[0].close()

    def forward(self):
        b = self.b
        ops = [load.op for _, _, _, load in self.open.values() if load.op != NO_OP]
        self.gate.let(*b.h.ops.live)
        good = dict.fromkeys(self.open, True)
        for layer in range(LAYERS):
            b.h.wait_layer(ops, layer)
            here = [x for x in b.pool.buffers if x.layer == layer]
            for r, (_, text, m, load) in self.open.items():
                good[r] &= b.same(text, np.concatenate([m.pages, load.pages]), 0, here)
        failed = b.h.verdict(ops)
        named = {r for e in failed for r in e.requests}
        assert all(ok for r, ok in good.items() if r not in named)
        self.requeue(failed)

    def abort(self, i):
        if i < len(self.open): self.open.pop([*self.open][i])[0].close()

    def room(self, n):
        R, b = self.b.world.size, self.b
        free = list(b.alloc.free_by_class)
        self.let_write_back()
        enough = b.h.make_room([n] * R)
        if enough: assert min(b.alloc.free_by_class) >= n
        else: assert b.alloc.free_by_class == free

    def reset(self):
        b, before = self.b, self.b.books()
        try: b.h.reset()
        except LeaseError: assert b.books() == before
        else: assert b.hostpool.used_bytes() == 0 and b.tree.num_ready[HOST] == 0

    def check(self):
        b = self.b
        b.check(TEXTS)
        for n in b.tree.nodes():
            for tier in Tier: assert (n.residency[tier] is ABSENT) == (not len(n.pages[tier]))
        for _, text, m, _ in self.open.values(): assert b.same(text, m.pages)

@given(R=st.integers(1, 3), policy=st.sampled_from(["write_through", "write_through", "write_back"]),
       after_hits=st.integers(1, 2), sizes=st.tuples(st.integers(3, 8), st.integers(2, 8)),
       program=st.lists(ACTIONS, min_size=5, max_size=30))
def test_any_program_keeps_the_laws(R, policy, after_hits, sizes, program):   # laws 1, 2, 3, 5
    def rank(world):
        with Bed(world, Steps(), *sizes, policy=policy, after_hits=after_hits) as b:
            m = Machine(b)
            for name, *args in program:
                getattr(m, name)(*args)
                m.check()
            for r in [*m.open]: m.open.pop(r)[0].close()
            b.gate.open()
            b.until_idle()
            b.h.reset()
            b.evict()
            m.check()
            for a in (b.alloc, b.hostpool.alloc): assert sum(a.free_by_class) == a.num_pages - R
            assert b.tree.num_locked == 0 and [*b.tree.nodes()] == []
            return [str(e) for e in world.ledger.entries], b.tree.digest(), b.h.counters
    said = on(R, rank)
    assert all(x == said[0] for x in said)
