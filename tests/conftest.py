"""What every test gets: seeds, one thread, poisoned fresh memory, the flags `cuda` and `slow`"""
import functools, os, random, sys

# Several processes share the cores: a thread that waits must sleep. Read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import hypothesis
import numpy as np
import pytest
import torch

hypothesis.settings.register_profile("quick", derandomize=True, deadline=None, database=None,
                                     max_examples=25)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("quick"),
                                     max_examples=500)


def pytest_addoption(parser):
    parser.addoption("--cuda", action="store_true", help="run the tests that need a CUDA device")
    parser.addoption("--slow", action="store_true", help="run the slow tests, more examples too")

def pytest_configure(config):
    slow, cuda = config.getoption("--slow"), config.getoption("--cuda")
    hypothesis.settings.load_profile("thorough" if slow else "quick")
    if cuda and not torch.cuda.is_available(): pytest.exit("--cuda, and no CUDA device", 4)

def pytest_collection_modifyitems(config, items):
    for flag in ("cuda", "slow"):
        if config.getoption(f"--{flag}"): continue
        skip = pytest.mark.skip(reason=f"needs --{flag}")
        for item in items:
            if flag in item.keywords: item.add_marker(skip)


@pytest.fixture(autouse=True)
def same_every_time():
    "Seeds and one thread, before each test"
    random.seed(0); np.random.seed(0); torch.manual_seed(0)
    torch.set_num_threads(1)


def poison(x: torch.Tensor) -> torch.Tensor:
    "Fill with what no result may contain: NaN, and integers far outside every table"
    if x.numel() == 0 or x.is_meta: return x
    if x.dtype is torch.bool: return x.fill_(True)
    if x.element_size() == 1:   # encoded rows: 0xff is NaN in every float format
        x.view(torch.uint8).fill_(0xff)
        return x
    if x.is_floating_point() or x.is_complex(): return x.fill_(float("nan"))
    return x.fill_(torch.iinfo(x.dtype).max)   # never -1: that means "nothing"

def poison_numpy(x: np.ndarray) -> np.ndarray:
    if x.dtype.kind in "fc": x.fill(np.nan)
    elif x.dtype.kind in "iu": x.fill(np.iinfo(x.dtype).max)
    return x

def from_cpkv(depth: int = 2) -> bool:
    "Whether the function that called ours belongs to the library"
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return name == "cpkv" or name.startswith("cpkv.")

def poisoned(make, fill):
    @functools.wraps(make)
    def wrapper(*args, **kw):
        x = make(*args, **kw)
        return fill(x) if from_cpkv() else x
    return wrapper

@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    "Memory that the library asks for uninitialised comes poisoned, on every thread of the test"
    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name), poison))
    for name in ("new_empty", "new_empty_strided"):
        monkeypatch.setattr(torch.Tensor, name, poisoned(getattr(torch.Tensor, name), poison))
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(np, name, poisoned(getattr(np, name), poison_numpy))

@pytest.fixture
def gates(monkeypatch):
    "A gate for the copies of each rank's engine, by rank"
    from cpkv.copies import Copies
    from cpkv.copy_thread import Hold
    made = {}
    def copies(pool, host, **kw):
        made[host.rank] = Hold(by_page=False)
        return Copies(pool, host, gate=made[host.rank], **kw)
    monkeypatch.setattr("cpkv.tiers.Copies", copies)
    return made
