"""The poison works: fresh memory of the library is NaN, other people's is not touched"""
import types

import numpy as np
import pytest
import torch


def as_cpkv(expression: str):
    "Value of an expression that a module of cpkv evaluates"
    module = types.ModuleType("cpkv.pretend")
    module.__dict__.update(torch=torch, np=np, x=torch.ones(3), i=torch.ones(3, dtype=torch.int64))
    exec(f"value = {expression}", module.__dict__)
    return module.value

@pytest.mark.parametrize("expression", ["torch.empty(5)", "torch.empty_like(x)", "x.new_empty(3)",
                                        "torch.empty_strided((2, 2), (2, 1))", "np.empty(4)",
                                        "torch.empty(2, 3, dtype=torch.bfloat16)"])
def test_floats_are_nan(expression):
    assert np.isnan(np.asarray(as_cpkv(expression).tolist())).all()

def test_bytes_decode_to_nan_and_indices_are_out_of_range():
    raw = as_cpkv("torch.empty(16, dtype=torch.uint8)")
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
        assert raw.view(dtype).float().isnan().all()
    assert (as_cpkv("torch.empty_like(i)") == torch.iinfo(torch.int64).max).all()
    assert as_cpkv("torch.empty(0)").shape == (0,)

def test_only_the_library_is_poisoned():
    assert not any(torch.empty(64).isnan().all() for _ in range(8))

def test_one_thread(): assert torch.get_num_threads() == 1
