"""A backend made for this GPU that cannot run warns once. The GPUs are not there."""

import json
import os
import subprocess
import sys

import pytest

# What a process prints: the backends that were chosen, and what it warned of.
CHOOSE = """
import json, sys, warnings
import torch
from torch._subclasses import FakeTensorMode, fake_tensor

capability = {capability}
torch.cuda.is_available = lambda: capability is not None
torch.cuda.get_device_capability = lambda *_: capability
fake_tensor.init_gpu_context = lambda *_: None  # a CUDA build of torch would initialise the GPU
{before}
import fa_ops
from fa_ops.call.call import DENSE, Call, Saved, attention_call
from fa_ops.plans import dispatch, planning

def one(dtype):
    return torch.empty(1, 2, 64, 64, dtype=dtype, device="{device}")

chosen = []
with warnings.catch_warnings(record=True) as caught, FakeTensorMode():
    warnings.simplefilter("always")
    for dtype in (torch.bfloat16, torch.float32):
        for causal in (False, True):
            for backward in (False, True):
                try:
                    q = one(dtype)
                    saved = Saved(q, None, q, q.new_empty(q.shape[:3])) if backward else None
                    call = attention_call(q, q, q, is_causal=causal, saved=saved)
                    chosen.append(dispatch.choose(planning.normalised(call)).__name__)
                except NotImplementedError as error:
                    chosen.append(str(error))
print(json.dumps([[name.removeprefix("fa_ops.backends.") for name in dict.fromkeys(chosen)],
                  [str(one.message) for one in caught if one.category is RuntimeWarning]]))
"""
HOPPER = (9, 0)
BLOCKED = "sys.modules['fa_ops.backends.hopper.runtime.nvrtc'] = None"
NO_NVRTC = "import os; os.environ['FA_OPS_NVRTC'] = os.devnull"
NO_TRITON = "sys.modules['triton'] = None"
OLD_NVRTC = """
import ctypes
class Old:
    @staticmethod
    def nvrtcVersion(major, minor):
        major._obj.value, minor._obj.value = 12, 0
        return 0
real = ctypes.CDLL
ctypes.CDLL = lambda name, *a, **o: Old if "libnvrtc" in str(name) else real(name, *a, **o)
"""


def choose(before="", capability=HOPPER, device="cuda", **environment):
    code = CHOOSE.format(before=before, capability=capability, device=device)
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env | environment
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize(
    "before, reason",
    [
        (BLOCKED, "cannot be imported"),
        (NO_NVRTC, "NVRTC 12.1 or newer was not found: /dev/null"),
        (OLD_NVRTC, "NVRTC 12.1 or newer was not found: libnvrtc.so.13 is 12.0"),
    ],
)
def test_a_missing_hopper_backend_warns_once(before, reason):
    chosen, warned = choose(before)
    assert chosen == ["triton"] and len(warned) == 1
    assert warned[0].startswith("fa_ops' 'hopper' backend, the fastest on this GPU, is not avail")
    assert reason in warned[0] and "FA_OPS_BACKEND" in warned[0]
    if "NVRTC" in reason:
        assert "pip install nvidia-cuda-nvrtc" in warned[0]


@pytest.mark.parametrize("capability", [(8, 0), (10, 0), None])
def test_none_where_the_backend_is_not_for_this_gpu(capability):
    chosen, warned = choose(BLOCKED, capability, "cuda" if capability else "cpu")
    assert (chosen, warned) == (["triton"] if capability else ["cpu"], [])


def test_none_for_cpu_tensors_beside_a_gpu():
    assert choose(NO_NVRTC, device="cpu") == [["cpu"], []]


def test_none_where_a_backend_was_chosen_by_name():
    assert choose(NO_NVRTC, FA_OPS_BACKEND="triton") == [["triton"], []]


def test_a_missing_triton_is_named_with_its_remedy():
    (message,), warned = choose(NO_TRITON, capability=(8, 0))
    assert warned == []
    assert "hopper: needs a Hopper GPU (sm_90), this one is sm_80" in message
    assert "triton: cannot be imported" in message and "pip install triton" in message
