"""What ranks run in the tests of worlds: new processes import these by name"""
import os
import signal
import sys
import threading
import time

import torch
import torch.distributed as dist

from cpkv.groups import FRAME, GroupWorld, world_from_env
from cpkv.laws import CpkvError, OrderError
from cpkv.ledger import LANES

DTYPES = ("float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool", "float8_e4m3fn")
SHAPES = ((), (0,), (1,), (7,), (2, 0, 3), (3, 5), (129, 33))
LETTERS = (("float8_e4m3fn", (3, 5)), ("bfloat16", (0,)), ("int64", ()), ("uint8", (100_000,)))

def part(rank: int, dtype: str, shape: tuple) -> torch.Tensor:
    "Bytes that are different on each rank and in each place, NaN patterns and -0.0 among them"
    gen = torch.Generator().manual_seed(1000 + rank)
    dt = getattr(torch, dtype)
    n = torch.empty(shape, dtype=dt).nbytes
    high = 2 if dtype == "bool" else 256
    raw = torch.randint(0, high, (n,), dtype=torch.uint8, generator=gen)
    return raw.view(dt).reshape(shape)

def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = lambda x: x.contiguous().reshape(-1).view(torch.uint8)
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(flat(a), flat(b))

def poisoned(x: torch.Tensor, size: int) -> torch.Tensor:
    out = torch.empty((size, *x.shape), dtype=x.dtype)
    out.reshape(-1).view(torch.uint8).fill_(1 if x.dtype == torch.bool else 0xA5)
    return out

def work(peers) -> dict:
    "Everything a healthy world does; wrong results are listed, not raised"
    wrong, world = [], peers.world()
    R, me = world.size, world.rank
    world.check_start({"page_size": 64, "long": "x" * 3 * FRAME})
    for dtype in DTYPES:
        for shape in SHAPES:
            mine = part(me, dtype, shape)
            out = poisoned(mine, R)
            got = world.all_gather(mine, tag=dtype, layer=len(shape), digest=9, out=out).wait()
            want = torch.stack([part(r, dtype, shape) for r in range(R)])
            if got is not out or not same_bits(got, want): wrong.append((dtype, shape))
    columns = torch.arange(12.).view(3, 4).T + me      # not contiguous
    last = world.all_gather(columns).wait()[R - 1]
    if not torch.equal(last, columns - me + R - 1): wrong.append("columns")
    if world.pending: wrong.append("pending")
    # lanes: issued ahead, awaited in another order
    tens = [torch.full((5,), 10 * i + me) for i in range(4)]
    ahead = [world.all_gather(x, lane="prefetch", layer=i) for i, x in enumerate(tens)]
    here = world.all_gather(torch.full((2,), me), layer=0)
    if len(world.pending) != 5: wrong.append("pending")
    for i in (2, 0, 3, 1):
        got = ahead[i].wait()[:, 0].tolist()
        if got != [10 * i + r for r in range(R)]: wrong.append(("ahead", i))
    if here.wait()[:, 0].tolist() != list(range(R)): wrong.append("here")
    if here.wait() is not here.wait(): wrong.append("idempotent")
    # agreements
    if world.agreed_min([me, -me, 2**40]) != [0, 1 - R, 2**40]: wrong.append("min")
    if world.agreed_max([me, -me]) != [R - 1, 0] or world.agreed_max([]) != []: wrong.append("max")
    world.agreed_equal("text", "y" * 2 * FRAME)
    try: world.agreed_equal("pages", "p" * (me == 1) * 2 * FRAME + "q")
    except OrderError as e:
        if "q on ranks 0 and 2" not in str(e) and R == 3: wrong.append(str(e)[:200])
    else: wrong.append("agreed_equal")
    world.barrier()
    # a world of the first two, beside the first one
    small = peers.world(2)
    if (small is None) != (me >= 2): wrong.append("members")
    if small and small.all_gather(torch.tensor([me])).wait().tolist() != [[0], [1]]:
        wrong.append("small")
    one = peers.world(1)
    if one and (one.backend, one.agreed_min([5])) != ("solo", [5]): wrong.append("one")
    # letters go round
    left, right = (me - 1) % R, (me + 1) % R
    for dtype, shape in LETTERS:
        got = part(me, dtype, shape).clone()
        if me == 0: peers.send(part(me, dtype, shape), right)
        peers.recv(got, left)
        if me != 0: peers.send(part(me, dtype, shape), right)
        if not same_bits(got, part(left, dtype, shape)): wrong.append(("letter", dtype))
    strided = torch.zeros(4, 6)
    if me == 1: peers.send(torch.arange(8.).view(2, 4).T, 0)
    if me == 0:
        peers.recv(strided[:, ::3], 1)
        if not torch.equal(strided[:, ::3], torch.arange(8.).view(2, 4).T): wrong.append("strided")
    ledger = world.ledger
    return {"wrong": wrong, "lines": {lane: ledger.lines(lane) for lane in LANES},
            "received": ledger.received("tag"), "prefetch": ledger.received(lanes=["prefetch"]),
            "control": sum(e.received_bytes for e in ledger.entries if e.lane == "control"),
            "threads": torch.get_num_threads(), "backend": world.backend, "pid": os.getpid()}

def predicted(R: int) -> dict:
    "What `work` must receive by tag"
    nbytes = {d: sum(part(0, d, s).nbytes for s in SHAPES) for d in DTYPES}
    return {d: (R - 1) * n for d, n in nbytes.items()} | {"": (R - 1) * (48 + 4 * 40 + 16)}

def spread(peers) -> dict:
    "Every rank is the source once, of every dtype and shape; every destination is poisoned"
    wrong, world = [], peers.world()
    R, me = world.size, world.rank
    for src in range(R):
        for dtype in DTYPES:
            for shape in SHAPES:
                x, out = part(me, dtype, shape), poisoned(part(me, dtype, shape), 1)[0]
                got = world.broadcast(x, src=src, tag=dtype, layer=src, digest=9, out=out).wait()
                if got is not out or not same_bits(got, part(src, dtype, shape)):
                    wrong.append((src, dtype, shape))
                if not same_bits(x, part(me, dtype, shape)): wrong.append("x has changed")
    place = torch.full((5,), -1.)                     # where it arrives will do as `x`
    tens = torch.arange(10.)[::2] if me == 1 else place
    if world.broadcast(tens, src=1, out=place).wait().tolist() != [0, 2, 4, 6, 8]: wrong.append("out")
    fresh = world.broadcast(torch.full((4,), me), src=R - 1).wait()
    if fresh.tolist() != [R - 1] * 4: wrong.append("fresh")
    # issued ahead, with gathers between, awaited in another order
    ahead = [world.broadcast(torch.full((3,), 10 * i + me), src=i % R, lane="prefetch", layer=i)
             for i in range(4)]
    here = world.all_gather(torch.tensor([me]))
    if len(world.pending) != 5: wrong.append("pending")
    for i in (2, 0, 3, 1):
        if ahead[i].wait().tolist() != [10 * i + i % R] * 3: wrong.append(("ahead", i))
    if here.wait().flatten().tolist() != list(range(R)) or world.pending: wrong.append("here")
    return {"wrong": wrong, "lines": {lane: world.ledger.lines(lane) for lane in LANES},
            "received": world.ledger.received(lanes=["main"]),
            "prefetch": world.ledger.received(lanes=["prefetch"])}

def spread_bytes(rank: int, R: int) -> tuple[dict, dict]:
    "What `spread` must receive by layer on the lanes main and prefetch"
    one = sum(part(0, d, s).nbytes for d in DTYPES for s in SHAPES)
    rest = 20 * (rank != 1) + 32 * (rank != R - 1) + 8 * (R - 1)
    return ({src: one * (src != rank) for src in range(R)} | {-1: rest},
            {i: 24 * (i % R != rank) for i in range(4)})

BASE = {"lane": "main", "tag": "latent", "layer": 3, "digest": 7}
ODD = {"lane": {"lane": "prefetch"}, "tag": {"tag": "index"}, "layer": {"layer": 4},
       "digest": {"digest": 8}, "shape": {"shape": (3, 2)}, "dtype": {"dtype": torch.int32},
       "op": {"op": "agreed_min"}}

def issue(world, odd: dict) -> object:
    "A collective like `BASE`, but for what is odd"
    how = BASE | odd
    if how.pop("op", "") == "agreed_min": return world.agreed_min([1])
    x = torch.zeros(how.pop("shape", (2, 3)), dtype=how.pop("dtype", torch.float32))
    return world.all_gather(x, **how).wait()

def differ(peers, kinds: tuple, odd_rank: int = 1) -> list[str]:
    "One rank differs in one thing after the other; what each rank was told"
    world, said = peers.world(), []
    for kind in kinds:
        try: issue(world, ODD[kind] if peers.rank == odd_rank else {})
        except OrderError as e: said.append(str(e))
        else: said.append("nothing")
    return said

SOURCES = {"src": {"src": 0}, "shape": {"shape": (3, 2)}, "digest": {"digest": 8}, "op": {}}

def differ_in_source(peers, kinds: tuple, odd_rank: int = 1) -> list[str]:
    "Broadcasts from rank 2 in which one rank differs; what each rank was told"
    world, said = peers.world(), []
    for kind in kinds:
        how = BASE | {"src": 2} | (SOURCES[kind] if peers.rank == odd_rank else {})
        x = torch.zeros(how.pop("shape", (2, 3)))
        try:
            if kind == "op" and peers.rank == odd_rank: world.all_gather(x, **BASE).wait()
            else: world.broadcast(x, **how).wait()
        except OrderError as e: said.append(str(e))
        else: said.append("nothing")
    return said

def swapped_sources(peers) -> list:
    "Two broadcasts of one size from rank 0, taken in the other order by rank 1"
    world = peers.world()
    return [world.broadcast(torch.full((4,), d), src=0, digest=d).wait().tolist()
            for d in ((11, 22) if peers.rank == 0 else (22, 11))]

def swapped_batches(peers) -> list:
    "Two batches of one size, taken in the other order by rank 1"
    world = peers.world()
    digests = (11, 22) if peers.rank == 0 else (22, 11)
    return [world.all_gather(torch.full((4,), d), digest=d).wait().tolist() for d in digests]

def start(peers, configs: list) -> None:
    "Start, each rank with a configuration of its own; then what debug would check"
    world = peers.world()
    world.check_start(configs[peers.rank])
    world.all_gather(torch.zeros(3)).wait()

class TwoArguments(Exception):
    "Cannot be made from its text: does not survive pickling"
    def __init__(self, a, b): super().__init__(f"{a}/{b}")

def fail(peers, how: str, rank: int = 1, folder: str = "") -> object:
    "One rank fails in the middle; the others are at a barrier"
    if folder:
        with open(os.path.join(folder, f"{peers.rank}"), "w") as f: f.write(str(os.getpid()))
    world = peers.world()
    world.barrier()
    if peers.rank == rank:
        if how == "raise": raise CpkvError("rank-local trouble", page=7)
        if how == "key": raise KeyError("x")
        if how == "unpicklable": raise TwoArguments(1, 2)
        if how == "result": return threading.Lock()
        if how == "exit": sys.exit(5)
        if how == "kill": os.kill(os.getpid(), signal.SIGKILL)
        if how == "leave": return "left"
        if how == "sleep": time.sleep(60)
        if how == "stop": os.kill(os.getpid(), signal.SIGSTOP)
        if how == "spin":
            stop = time.monotonic() + 60
            while time.monotonic() < stop: pass
    world.barrier()
    world.barrier()
    return peers.rank

def who(peers, x: object = None) -> tuple:
    "Rank, and what came with it"
    return peers.rank, x, os.environ.get("CPKV_TEST", ""), os.environ.get("CPKV_LATE", "")

def grid(peers) -> dict:
    "Four ranks as 2 x 2; the world is a column, not the run"
    columns = {0: [0, 2], 1: [1, 3]}
    groups = {c: {lane: dist.new_group(ranks) for lane in LANES} for c, ranks in columns.items()}
    world = GroupWorld(groups[peers.rank % 2], "gloo", timeout=20)
    got = world.all_gather(torch.tensor([peers.rank])).wait().flatten().tolist()
    alone = [dist.new_group([r]) for r in range(4)][peers.rank]
    single = GroupWorld(dict.fromkeys(LANES, alone), "gloo", timeout=20)
    five = single.all_gather(torch.tensor([5])).wait().tolist()
    return {"rank": world.rank, "size": world.size, "got": got, "received": world.ledger.received(),
            "single": (single.rank, single.size, five, single.ledger.received())}

def from_env(env: dict, queue) -> None:
    "A process as torchrun starts it"
    os.environ.update(env)
    world = world_from_env(timeout=20)
    out = world.all_gather(torch.tensor([world.rank + 5]), layer=1).wait().flatten().tolist()
    world.check_start({"page_size": 64})
    received = world.ledger.received()
    world.close()
    threads, left = torch.get_num_threads(), dist.is_initialized()
    queue.put((world.backend, world.size, out, received, threads, left))

def staged(peers) -> list:
    "Ranks that share one GPU"
    world = peers.world()
    x = torch.full((3, 5), world.rank + 1.0, device="cuda")
    out = world.all_gather(x.to(torch.float8_e4m3fn)).wait()
    sent = world.broadcast(x, src=1).wait()
    return [out.device.type, out.float().mean((1, 2)).tolist(), sent.mean().item()]
