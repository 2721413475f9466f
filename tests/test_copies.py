"""Copies beside the step: the same bytes, a result each, no wait without end, nothing left behind"""
import itertools
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cpkv.alloc import Holder, PageAllocator
from cpkv.copies import Copies, bench_copies
from cpkv.copy_thread import ACK, Done, Failed, Hold, Kind, cut_runs, find_runs, probe_pools
from cpkv.host_pool import FORMS, HostPool, hash_pages, pinned_bytes
from cpkv.launch import run_ranks
from cpkv.laws import (CapacityError, ConfigError, ConservationError, InputError, LeaseError,
                       OrderError, OwnershipError, PageIdError, PeerError, ResidencyError,
                       WaitTimeout)
from cpkv.payload import payload_of
from cpkv.pool import Pool

LAYERS = 3
POINTS = [*itertools.product(range(LAYERS), range(3)), (ACK, 0)]  # a copy of three pages


class Bed:
    "A device pool, a host pool and what moves between them"
    def __init__(self, gate=None, checksums=False, **kw):
        self.device, self.host = probe_pools(**kw)
        self.alloc = PageAllocator(self.device.layout, self.device.local_pages)
        self.gate = Hold() if gate is None else gate
        self.copies = Copies(self.device, self.host, gate=self.gate, timeout=10,
                             checksums=checksums)

    def __enter__(self): return self
    def __exit__(self, *_): self.copies.close()

    def store(self, op_id, pages):
        "Write and keep"
        self.copies.backup(op_id, np.asarray(pages))
        self.copies.wait_op(op_id)
        [r] = self.copies.pop_writes(1)
        self.host.keep(r.host_pages)
        return r.host_pages

    def digests(self, device_pages):
        return hash_pages(self.device.buffers, self.host.mine(device_pages))

    def used(self):
        "Every count that must be zero when nothing is in flight or stored"
        h, a = self.host, self.alloc
        return [len(self.copies.claims), len(h.claims), *h.alloc.count(Holder.TRANSFER),
                *h.alloc.count(Holder.TREE), *a.count(Holder.TRANSFER), *a.count(Holder.REQUEST),
                int((h._written != 0).sum()), len(h._digests)]

@pytest.fixture(autouse=True)
def no_thread_stays():
    yield
    assert [t.name for t in threading.enumerate() if t.name.startswith("cpkv-")] == []


# -- runs

@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=20))
def test_runs_are_the_pairs_in_order_and_no_longer_run_exists(pairs):
    src, dst = (np.array([p[i] for p in pairs], int) for i in (0, 1))
    runs = find_runs(src, dst)
    flat = [(s + i, d + i) for _, s, d, n in runs for i in range(n)]
    assert flat == pairs and [r[0] for r in runs] == list(np.cumsum([0, *(r[3] for r in runs)])[:-1])
    for (_, s, d, n), (_, t, e, _) in itertools.pairwise(runs): assert (s + n, d + n) != (t, e)
    assert [(s, d) for _, s, d, n in cut_runs(runs, True)] == pairs


# -- the same bytes

@pytest.mark.parametrize("form", sorted(FORMS))
@pytest.mark.parametrize("n", [0, 1, 64, 113, 127, 128, 129, 300])  # LMCache#5151
def test_what_comes_back_is_what_went_at_every_size(form, n):
    with Bed(form=form, local_pages=n + 2, host_pages=n + 2, checksums=True) as b:
        order = np.random.default_rng(n).permutation(n) + 1
        before = b.digests(order)
        stored = b.store(1, order)
        assert hash_pages(b.host.buffers, b.host.mine(stored)) == before
        b.device.poison(range(n + 2))
        back = b.copies.load_back(2, stored[::-1], b.alloc)
        b.copies.wait_op(2)
        assert isinstance(b.copies.pop_loads(1)[0], Done)
        assert b.digests(back[::-1]) == before

@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize("pages", [[3], [4, 5], [3, 4, 5, 6, 7, 8, 9], [8, 6, 5, 9]])
def test_a_rank_moves_its_own_stripe_and_touches_nothing_else(rank, pages):
    with Bed(rank=rank, cp_size=3) as b:
        host_pages = b.store(1, pages)
        local = b.host.mine(host_pages)
        assert hash_pages(b.host.buffers, local) == b.digests(np.array(pages))
        others = np.setdiff1d(np.arange(9), local)
        assert all((x.pages[others] == 0).all() for x in b.host.buffers if len(x.pages))
        assert [len(r) for r in [local]] == [sum(p % 3 == rank for p in pages)]

def test_the_four_parts_all_move():                                # traps 44 to 46
    with Bed() as b:
        pages = b.store(1, [1, 2])
        for x, y in zip(b.device.buffers, b.host.buffers):
            if len(x.pages): assert torch.equal(x.pages[[1, 2]], y.pages[b.host.mine(pages)])
        moved = {b.host.payload.part_of(y) for y in b.host.buffers if len(y.pages)
                 and y.pages[b.host.mine(pages)].any()}
        assert len(moved) == 4

def test_a_host_pool_of_another_payload_is_refused_at_start():
    device, _ = probe_pools()
    other = Pool(device.layout, has_index=(True, False), dims=device.dims, format=device.format,
                 local_pages=9)
    host = HostPool(payload_of(other, 0), 0, 10_000)
    with pytest.raises(ConfigError): Copies(device, host)


@pytest.mark.parametrize("kind", Kind)
def test_what_failed_is_told_before_it_is_popped(kind):
    with Bed() as b:
        stored = b.store(0, [1])
        b.gate.fail(OSError("broken"), 2)
        for i in (1, 2, 3):
            if kind is Kind.WRITE: b.copies.backup(i, np.array([i + 1]))
            else: b.copies.load_back(i, stored, b.alloc)
        b.copies.wait_op(3)
        assert [f.op_id for f in b.copies.failed(kind)] == [2] and isinstance(b.copies.failed(kind)[0], Failed)
        assert [b.copies.failed(k) for k in Kind if k is not kind] == [[]]
        (b.copies.pop_writes if kind is Kind.WRITE else b.copies.pop_loads)(2)
        assert b.copies.failed(kind) == []


# -- layers

def test_layers_come_in_order_and_a_wait_is_for_all_components():
    with Bed() as b:
        stored = b.store(1, [1, 2, 3])
        for layer in range(LAYERS): b.gate.hold(2, layer)
        back = b.copies.load_back(2, stored, b.alloc)
        for x in b.device.buffers:
            if len(x.pages): x.pages[b.host.mine(back)] = 0
        for layer in range(LAYERS):
            b.gate.reached(2, layer)
            with pytest.raises(WaitTimeout, match=f"layer={layer}"):
                b.copies.wait_layer(2, layer, timeout=0)
            b.gate.open(2, layer)
            b.copies.wait_layer(2, layer)
            for x, y in zip(b.device.buffers, b.host.buffers):
                if x.layer <= layer and len(x.pages):
                    assert torch.equal(x.pages[b.host.mine(back)], y.pages[b.host.mine(stored)])
        with pytest.raises(InputError): b.copies.wait_layer(2, LAYERS)
        b.copies.wait_op(2)
        b.copies.pop_loads(1)
        with pytest.raises(OrderError): b.copies.wait_layer(2, 0)

def test_a_reader_held_at_a_layer_does_not_read_early():           # trap 21
    with Bed() as b:
        stored, seen = b.store(1, [1]), []
        b.device.poison([1])
        for layer in (1, 2): b.gate.hold(2, layer)
        b.copies.load(2, stored, np.array([1]), node=4)
        def read():
            b.copies.wait_layer(2, 1)
            seen.append(b.digests(np.array([1]))[0] is not None and bool(
                torch.equal(b.device.latent[1].pages[1], b.host.buffers[1].pages[1])))
        reader = threading.Thread(target=read)
        reader.start()
        b.gate.reached(2, 1)
        assert seen == [] and (b.device.latent[1].pages[1] == 255).all()
        thread = b.copies._threads[Kind.LOAD]
        for _ in range(1000):                                      # until the reader is asleep
            if thread.layer_waits: break
            time.sleep(0.01)
        assert thread.layer_waits == 1
        b.gate.open(2, 1)
        reader.join(5)                                             # woken by the layer, not by the end
        assert seen == [True] and thread.layer_waits == 0
        b.gate.open(2, 2)
        b.copies.wait_op(2)

def test_joiners_of_a_failed_load_are_told_at_every_layer():
    with Bed() as b:
        stored = b.store(1, [1, 2, 3])
        b.gate.fail(OSError("gone"), 2, 1, 2)
        b.copies.load_back(2, stored, b.alloc, node=6)
        b.copies.wait_op(2)
        for layer in range(LAYERS):
            with pytest.raises(ResidencyError, match="node=6"): b.copies.wait_layer(2, layer)
        [r] = b.copies.pop_loads(1)
        assert isinstance(r, Failed) and isinstance(r.error, OSError)
        b.host.check_written(stored)                               # the host copy is whole


# -- faults: after every step of every move nothing is left

@pytest.mark.parametrize("checksums", [False, True])
@pytest.mark.parametrize("layer,page", POINTS)
def test_a_write_broken_anywhere_leaves_nothing(layer, page, checksums):
    with Bed(checksums=checksums) as b:
        b.gate.fail(OSError("lost"), 1, layer, page)
        pages = b.copies.backup(1, np.array([1, 2, 3]))
        b.copies.wait_op(1)
        with pytest.raises(LeaseError): b.host.drop(pages, Holder.TRANSFER)  # not popped yet
        [r] = b.copies.pop_writes(1)
        assert isinstance(r, Failed) and r.host_pages.tolist() == pages.tolist()
        with pytest.raises(ResidencyError): b.host.keep(pages)
        b.host.drop(pages, Holder.TRANSFER)
        assert not any(b.used())
        b.host.alloc.check()
        b.store(2, [1, 2, 3])                                      # and the next one works

@pytest.mark.parametrize("layer,page", POINTS)
def test_a_load_broken_anywhere_leaves_the_host_copy_and_nothing_else(layer, page):
    with Bed() as b:
        stored = b.store(1, [1, 2, 3])
        b.gate.fail(OSError("lost"), 2, layer, page)
        pages = b.copies.load_back(2, stored, b.alloc)
        b.copies.wait_op(2)
        [r] = b.copies.pop_loads(1)
        assert isinstance(r, Failed)
        b.alloc.free(pages, Holder.TRANSFER)
        b.host.drop(stored)
        assert not any(b.used())

@pytest.mark.parametrize("layer,page", POINTS)
def test_an_abort_anywhere_ends_in_a_result(layer, page):
    with Bed() as b:
        b.gate.hold(1, layer, page)
        pages = b.copies.backup(1, np.array([1, 2, 3]))
        b.gate.reached(1, layer, page)
        b.copies.abort(1)
        assert b.copies.ready_writes() == []                       # asked, not yet ended
        with pytest.raises(LeaseError): b.host.drop(pages, Holder.TRANSFER)
        b.gate.open(1, layer, page)
        b.copies.wait_op(1)
        [r] = b.copies.pop_writes(1)
        assert isinstance(r, Done if layer == ACK else Failed)     # it was through, or it stopped
        b.host.drop(pages, Holder.TRANSFER)
        assert not any(b.used())

@pytest.mark.parametrize("fault", ["owner", "pairs", "sink", "past", "twice", "busy", "id", "class"])
def test_a_refused_backup_takes_nothing(fault):
    with Bed(cp_size=2, host_pages=5) as b:
        b.gate.hold(9)
        b.store(8, [16])
        b.copies.backup(9, np.array([4, 5]))
        before = (b.used(), b.host.alloc.free_by_class)
        good = dict(op_id=1, pages=[6, 7])
        bad = good | dict(owner={}, pairs={}, sink=dict(pages=[6, 1]), past=dict(pages=[6, 99]),
                          twice=dict(pages=[6, 6]), busy={}, id=dict(op_id=9),
                          **{"class": dict(pages=[7, 9, 11, 13])})[fault]
        errors = dict(sink=PageIdError, past=PageIdError, twice=PageIdError, id=OrderError,
                      **{"class": CapacityError})
        if fault in errors:
            with pytest.raises(errors[fault]): b.copies.backup(bad["op_id"], np.array(bad["pages"]))
        elif fault == "busy":   # a device page that a load writes is no source
            b.gate.hold(7)
            tree = np.flatnonzero(b.host.alloc._holder == Holder.TREE)
            b.copies.load(7, tree, np.array([6]))
            before = (b.used(), b.host.alloc.free_by_class)
            with pytest.raises(LeaseError): b.copies.backup(1, np.array([6]))
        else:
            mine = b.host.take(np.array([6, 7]))
            device = dict(owner=[7, 6], pairs=[6])[fault]
            error = dict(owner=OwnershipError, pairs=ConservationError)[fault]
            with pytest.raises(error): b.copies.write(1, np.array(device), mine)
            b.host.drop(mine, Holder.TRANSFER)
        assert (b.used(), b.host.alloc.free_by_class) == before
        for op_id in (7, 9): b.gate.open(op_id)

def test_a_refused_load_back_gives_its_device_pages_back():
    with Bed() as b:
        pages = b.host.take(np.array([1, 2]))
        for stage in ("transfer", "tree, not written"):
            with pytest.raises((ConservationError, ResidencyError)):
                b.copies.load_back(1, pages, b.alloc)
            assert b.alloc.free_by_class == [8]
            if stage == "transfer": b.host.alloc.move(pages, Holder.TRANSFER, Holder.TREE)
        b.alloc.take([np.zeros(7, int)])
        with pytest.raises(CapacityError): b.copies.load_back(1, pages, b.alloc)
        assert b.alloc.free_by_class == [1]


# -- order, acks, generations

def test_results_come_in_the_order_of_issue_and_only_as_a_prefix():
    with Bed() as b:
        b.gate.hold(2, ACK)
        b.gate.fail(OSError("second"), 1, 0, 0)
        for op_id in (1, 2, 3): b.copies.backup(op_id, np.array([op_id]))
        b.gate.reached(2, ACK)
        assert b.copies.ready_writes() == [1]
        with pytest.raises(OrderError, match="count=2, ready=1"): b.copies.pop_writes(2)
        assert [type(r) for r in b.copies.pop_writes(1)] == [Failed]
        assert b.copies.pop_writes(0) == [] and b.copies.ready_loads() == []
        b.gate.open(2, ACK)
        b.copies.wait_op(3)
        assert [(r.op_id, type(r)) for r in b.copies.pop_writes(2)] == [(2, Done), (3, Done)]

def test_a_load_does_not_wait_behind_a_write():
    with Bed() as b:
        stored = b.store(1, [1])
        b.gate.hold(2)
        b.copies.backup(2, np.array([2]))
        b.gate.reached(2)
        b.copies.load(3, stored, np.array([5]))
        b.copies.wait_op(3)
        assert (b.copies.ready_writes(), b.copies.ready_loads()) == ([], [3])
        b.gate.open(2)

def acks(peers, late):
    world = peers.world()
    with Bed(rank=peers.rank, cp_size=peers.size) as b:
        if peers.rank == late: b.gate.hold(2, ACK)
        counts = []
        for op_id, pages in ((1, [4, 5]), (2, [4]), (3, [6, 7])):  # 2: one rank has pages
            b.copies.backup(op_id, np.array(pages))
        b.copies.wait_op(1 if peers.rank == late else 3)
        counts += world.agreed_min([len(b.copies.ready_writes())])
        kept = b.copies.pop_writes(counts[-1])
        b.gate.open(2, ACK)
        b.copies.wait_op(3)
        counts += world.agreed_min([len(b.copies.ready_writes())])
        kept += b.copies.pop_writes(counts[-1])
        for r in kept: b.host.keep(r.host_pages)
        return counts, [r.op_id for r in kept], b.host.alloc.count(Holder.TREE), b.used()[:2]

@pytest.mark.parametrize("late", range(4))
def test_no_write_counts_before_every_rank_has_acked(late):        # traps 36, 40, 41
    out = run_ranks(acks, 4, late, backend="local", timeout=20)
    assert all(counts == [1, 2] for counts, *_ in out)
    assert all(ids == [1, 2, 3] and tree == [2, 1, 1, 1] and used == [0, 0]
               for _, ids, tree, used in out)

def test_a_flush_is_refused_while_a_byte_moves_and_then_ignores_late_acks():   # sglang-jax#1396
    with Bed() as b:
        b.store(1, [1])
        b.gate.hold(2, 1)
        b.copies.backup(2, np.array([2, 3]))
        b.gate.reached(2, 1)
        before = b.used()
        assert not b.copies.drain(0)
        with pytest.raises(LeaseError, match="busy"): b.copies.flush()
        assert b.used() == before
        b.gate.hold(2, ACK)
        b.gate.open(2, 1)
        assert b.copies.drain()
        [r] = b.copies.flush()
        assert isinstance(r, Failed) and r.op_id == 2 and not any(b.used())
        assert b.host.used_bytes() == 0 and b.copies.generation == 1
        pages = b.copies.backup(2, np.array([4]))                  # the same id, the same host page
        assert b.copies.ready_writes() == []
        b.gate.open(2, ACK)
        b.copies.wait_op(2)
        assert b.copies.num_late == 1
        b.host.keep(b.copies.pop_writes(1)[0].host_pages)
        assert hash_pages(b.host.buffers, b.host.mine(pages)) == b.digests(np.array([4]))

def flush_or_none(peers):
    world = peers.world()
    with Bed(rank=peers.rank, cp_size=2) as b:
        if peers.rank == 1: b.gate.hold(1, 2)
        b.copies.backup(1, np.array([2, 3]))
        if peers.rank == 1: b.gate.reached(1, 2)
        else: b.copies.wait_op(1)
        first = world.agreed_min([b.copies.drain(0)])[0]
        b.gate.open(1, 2)
        second = world.agreed_min([b.copies.drain()])[0]
        if second: b.copies.flush()
        return first, second, any(b.used())

def test_all_ranks_flush_or_none():
    assert run_ranks(flush_or_none, 2, backend="local", timeout=20) == [(0, 1, False)] * 2


# -- who may touch what meanwhile

def test_a_page_in_flight_is_nobody_elses():                       # traps 38, 42, 43
    with Bed() as b:
        stored = b.store(1, [1, 2])
        b.gate.hold(2)
        b.copies.load(2, stored, np.array([5, 6]))
        with pytest.raises(LeaseError): b.host.drop(stored)
        with pytest.raises(LeaseError): b.copies.load(3, stored[:1], np.array([6]))
        with pytest.raises(LeaseError): b.copies.backup(3, np.array([5]))
        b.copies.load(3, stored, np.array([7, 8]))                 # readers share
        b.gate.open(2)
        b.copies.wait_op(3)
        with pytest.raises(LeaseError): b.host.drop(stored)        # ended here, not popped
        b.copies.pop_loads(2)
        b.host.drop(stored)

def test_claims_are_equal_on_a_rank_that_owns_no_page_of_it():
    with Bed(rank=1, cp_size=2) as b:
        pages = b.copies.backup(1, np.array([2, 4]))               # all of rank 0
        b.copies.wait_op(1)
        with pytest.raises(LeaseError): b.host.drop(pages, Holder.TRANSFER)
        b.copies.pop_writes(1)
        b.host.drop(pages, Holder.TRANSFER)


# -- checksums

def test_a_load_of_changed_bytes_fails_before_it_writes():
    with Bed(checksums=True) as b:
        stored = b.store(1, [1, 2])
        b.host.buffers[-1].pages[b.host.mine(stored)[1], 0] ^= 4   # the draft's index
        before = b.digests(np.array([5, 6]))
        b.copies.load(2, stored, np.array([5, 6]), node=11)
        b.copies.wait_op(2)
        [r] = b.copies.pop_loads(1)
        assert isinstance(r.error, ResidencyError)
        assert (r.error.facts["node"], r.error.facts["rank"]) == (11, 0)
        assert b.digests(np.array([5, 6])) == before


# -- no wait without end

@pytest.mark.parametrize("kind", Kind)
def test_a_dead_thread_is_named_by_everything_that_needs_it(kind):
    with Bed() as b:
        stored = b.store(1, [1])
        b.gate.fail(SystemExit("killed"), 2)
        if kind is Kind.WRITE: b.copies.backup(2, np.array([2]))
        else: b.copies.load(2, stored, np.array([2]))
        said = f"cpkv-{kind.value}-rank0.*killed"
        with pytest.raises(PeerError, match=said): b.copies.wait_op(2)
        ready = b.copies.ready_writes if kind is Kind.WRITE else b.copies.ready_loads
        again = ((lambda: b.copies.backup(3, np.array([3]))) if kind is Kind.WRITE
                 else lambda: b.copies.load(3, stored, np.array([3])))
        free = b.host.alloc.free_by_class
        for call in (ready, again, b.copies.drain):
            with pytest.raises(PeerError, match=said): call()
        assert b.host.alloc.free_by_class == free
        if kind is Kind.LOAD:
            with pytest.raises(PeerError, match=said): b.copies.wait_layer(2, 0)

def test_waits_are_bounded_and_say_for_what():
    with Bed() as b:
        b.gate.hold(1)
        b.copies.backup(1, np.array([1]))
        with pytest.raises(WaitTimeout, match="op_id=1"): b.copies.wait_op(1, timeout=0)
        b.copies.timeout = 0
        with pytest.raises(WaitTimeout, match="cpkv-write-rank0"): b.copies.close()
        b.copies.timeout = 10
        b.gate.open(1)

def test_close_aborts_what_waits_and_ends_its_claims():
    with Bed() as b:
        b.gate.hold(1)
        for op_id in (1, 2, 3): b.copies.backup(op_id, np.array([op_id]))
        b.gate.reached(1)
        b.gate.open(1)
        b.copies.close()
        assert len(b.copies.claims) == len(b.host.claims) == 0
        with pytest.raises(PeerError, match="closed"): b.copies.backup(4, np.array([4]))

def test_the_step_is_not_blocked_by_a_copy():
    with Bed() as b:
        b.gate.hold(1)
        b.copies.backup(1, np.array([1]))
        b.gate.reached(1)                                          # the copy stands still
        b.device.buffers[0].pages[5] = 1                           # and we are here
        assert b.copies.ready_writes() == []
        b.gate.open(1)


# -- anything in any order

@given(st.data())
def test_any_mix_of_operations_conserves_pages_and_bytes(data):
    with Bed(cp_size=2, local_pages=7, host_pages=5) as b:
        truth, stored, op_id = {}, [], 0
        for _ in range(data.draw(st.integers(1, 12))):
            op_id += 1
            act = data.draw(st.sampled_from(["write", "load", "drop", "fault"]))
            if act in ("write", "fault"):
                pages = np.array(data.draw(st.lists(st.integers(2, 13), unique=True, max_size=4)),
                                 int)
                if act == "fault": b.gate.fail(OSError(), op_id, data.draw(st.integers(0, 2)))
                try: host_pages = b.copies.backup(op_id, pages)
                except CapacityError: continue
                b.copies.wait_op(op_id)
                [r] = b.copies.pop_writes(1)
                if isinstance(r, Failed): b.host.drop(host_pages, Holder.TRANSFER)
                else:
                    b.host.keep(host_pages)
                    stored.append(host_pages)
                    truth[tuple(host_pages)] = b.digests(pages)
                assert (act == "fault") == isinstance(r, Failed)
            elif stored and act == "load":
                pages = data.draw(st.sampled_from(stored))
                back = b.copies.load_back(op_id, pages, b.alloc)
                b.copies.wait_op(op_id)
                b.copies.pop_loads(1)
                assert b.digests(back) == truth[tuple(pages)]
                b.alloc.free(back, Holder.TRANSFER)
            elif stored:
                pages = stored.pop(data.draw(st.integers(0, len(stored) - 1)))
                del truth[tuple(pages)]
                b.host.drop(pages)
            b.host.alloc.check()
            b.alloc.check()
            assert sum(b.host.alloc.count(Holder.TREE)) == sum(map(len, stored))
            assert len(b.copies.claims) == len(b.host.claims) == 0


def test_the_bench_moves_every_byte_and_draws():
    rates = bench_copies(1, 2, 2, repeats=1, form="page_first")
    ours = {"backup_gb_s", "loadback_gb_s", "copy_gb_s", "copy_to_host_gb_s", "copy_to_device_gb_s"}
    assert set(rates) == ours | {"backup_share", "loadback_share"} and min(rates.values()) > 0
    with Bed() as b:
        b.gate.hold(1, 2)
        b.copies.backup(1, np.array([1]))
        b.gate.reached(1, 2)
        assert "write 1" in b.copies._repr_html_() and "1 writes" in repr(b.copies)
        b.gate.open(1, 2)


@pytest.mark.cuda
@pytest.mark.parametrize("form", sorted(FORMS))
def test_on_cuda_a_copy_waits_for_the_step_and_the_step_for_a_layer(form):   # vllm#46278
    cpu, _ = probe_pools()
    device = Pool(cpu.layout, has_index=cpu.has_index, dims=cpu.dims, format=cpu.format,
                  local_pages=9, device="cuda")
    host = HostPool(payload_of(device, 1), 0, 9 * device.page_bytes(), form=form,
                    new_bytes=pinned_bytes)
    with Copies(device, host, checksums=True) as copies:
        torch.cuda._sleep(100_000_000)                             # the step is slow to write
        for a, b in zip(device.buffers, cpu.buffers): a.pages.copy_(b.pages, non_blocking=True)
        pages = copies.backup(1, np.array([1, 2, 3]))
        copies.wait_op(1)
        host.keep(copies.pop_writes(1)[0].host_pages)
        want = hash_pages(cpu.buffers, np.array([1, 2, 3]))
        assert hash_pages(host.buffers, host.mine(pages)) == want
        old = device.buffers[0].pages[5].clone()
        torch.cuda._sleep(100_000_000)                             # a slow reader of page 5
        seen = device.buffers[0].pages[5].clone()
        copies.load(2, pages, np.array([5, 6, 7]))
        for layer in range(LAYERS): copies.wait_layer(2, layer)
        got = hash_pages(device.buffers, np.array([5, 6, 7]))
        assert torch.equal(seen, old) and got == want
        copies.wait_op(2)
        copies.pop_loads(1)
    host.close()
