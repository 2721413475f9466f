"A reader on trial: what all ranks say together, and what one rank alone says"
import torch

from cpkv.launch import run_ranks
from cpkv.reader import Reader
from cpkv.shared_kv import probe_reader


def over(R, kind, batches, *args, backend="local", **how):
    "What all ranks say together; the ledger of each holds what was predicted for that rank"
    got = run_ranks(probe_reader, R, kind, batches, *args, backend=backend, **how)
    for _, received, predicted in got: assert received == predicted
    assert sum(len(said) for said, *_ in got) == len({k for said, *_ in got for k in said})
    return {k: v for said, *_ in got for k, v in said.items()}

def alone(batches, *args):
    "The oracle: one rank, the whole cache, each request alone and in one chunk"
    stops = {q: stop for batch in batches for q, _, stop in batch}
    return {k: v for q, n in stops.items() for k, v in over(1, Reader, [[(q, 0, n)]], *args).items()}

def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(x, y) for k in a for x, y in zip(a[k], b[k]))

def chunks(*cuts): return [[(0, a, b)] for a, b in zip(cuts, cuts[1:])]
