"""diffusers' context parallelism with fa_ops on gloo processes, against one process."""

from __future__ import annotations

import functools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

pytest.importorskip("diffusers", reason="needs diffusers: pip install 'fa-ops[diffusers]'")

from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import ParallelConfig
from diffusers.models.attention_dispatch import attention_backend, dispatch_attention_fn

import hf_integration.diffusers
from tests.hf_integration import tiny_diffusers
from tests.hf_integration.tiny_diffusers import TINY

assert hf_integration.diffusers.NAME  # the import registers the backend
WORLD = 2


def configured(**degrees) -> ParallelConfig:
    config = ContextParallelConfig(**degrees)
    mesh = dist.device_mesh.init_device_mesh(
        "cpu", config.mesh_shape, mesh_dim_names=config.mesh_dim_names
    )
    parallel = ParallelConfig(context_parallel_config=config)
    parallel.setup(dist.get_rank(), WORLD, torch.device("cpu"), mesh=mesh)
    return parallel


def check_attention(has_mask: bool = False, **degrees) -> None:
    """Out and gradients of each process are its part of those of the whole sequence."""
    S = 6
    *tensors, grad = (torch.randn(2, WORLD * S, 4, 16) for _ in range(4))
    mask = tiny_diffusers.padding(7, WORLD * S, size=WORLD * S)[:, None, None]
    part = slice(dist.get_rank() * S, (dist.get_rank() + 1) * S)
    expected = outcome(sdpa, *tensors, grad, mask if has_mask else None)
    attend = functools.partial(
        dispatch_attention_fn, backend="fa_ops", parallel_config=configured(**degrees)
    )
    local = mask[..., part].contiguous() if has_mask else None
    actual = outcome(attend, *(x[:, part] for x in tensors), grad[:, part], local)
    for x, y in zip(actual, expected):
        torch.testing.assert_close(x, y[:, part], atol=1e-5, rtol=1e-4)


def sdpa(q, k, v, attn_mask):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask).transpose(1, 2)


def outcome(attend, q, k, v, grad, mask) -> list[torch.Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves, attn_mask=mask)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def check_lengths_that_differ() -> None:
    """The first process has four tokens and the second one has seven."""
    tensors = [torch.randn(2, 11, 4, 16) for _ in range(3)]
    part = slice(0, 4) if dist.get_rank() == 0 else slice(4, 11)
    config = configured(ring_degree=WORLD, ring_anything=True)
    actual = dispatch_attention_fn(
        *(x[:, part] for x in tensors), backend="fa_ops", parallel_config=config
    )
    torch.testing.assert_close(actual, sdpa(*tensors, None)[:, part], atol=1e-5, rtol=1e-4)


def distribute(model, **degrees) -> None:
    with mock.patch("torch.accelerator.device_count", return_value=1):  # 0 would be a divisor
        model.enable_parallelism(config=ContextParallelConfig(**degrees))


def check_model(name: str, **degrees) -> None:
    """A model whose inputs diffusers distributes has the output of one process."""
    model, inputs = TINY[name].build(), TINY[name].inputs()
    with attention_backend("native"), torch.no_grad():
        expected = tiny_diffusers.run(model, inputs)
    model.set_attention_backend("fa_ops")
    distribute(model, **degrees)
    with torch.no_grad():
        torch.testing.assert_close(
            tiny_diffusers.run(model, inputs), expected, atol=1e-5, rtol=1e-4
        )


def check_errors() -> None:
    q = torch.randn(2, 6, 4, 16)
    mask = tiny_diffusers.padding(4, 6, size=6)[:, None, None]
    ring, ulysses = configured(ring_degree=WORLD), configured(ulysses_degree=WORLD)
    attend = functools.partial(dispatch_attention_fn, q, q, q, backend="fa_ops")
    with pytest.raises(ValueError, match="attn_mask must be None with ring_degree 2"):
        attend(attn_mask=mask, parallel_config=ring)
    with pytest.raises(ValueError, match="dropout_p must be 0 with context parallelism, got 0.1"):
        attend(dropout_p=0.1, parallel_config=ulysses)
    with pytest.raises(ValueError, match="is_causal must be False with context parallelism"):
        attend(is_causal=True, parallel_config=ulysses)
    with pytest.raises(ValueError, match="attn_mask must not require grad"):
        attend(attn_mask=torch.zeros(6, 6, requires_grad=True), parallel_config=ulysses)
    model = TINY["flux"].build()
    model.set_attention_backend("fa_ops_8bit")
    with pytest.raises(ValueError, match="does not support context parallelism"):
        distribute(model, ring_degree=WORLD)


CHECKS = {
    "ring": lambda: check_attention(ring_degree=WORLD),
    "ring without float32": lambda: check_attention(ring_degree=WORLD, convert_to_fp32=False),
    "ring, any lengths": check_lengths_that_differ,
    "ulysses": lambda: check_attention(ulysses_degree=WORLD),
    "ulysses, mask": lambda: check_attention(has_mask=True, ulysses_degree=WORLD),
    "flux, ring": lambda: check_model("flux", ring_degree=WORLD),
    "flux, ulysses": lambda: check_model("flux", ulysses_degree=WORLD),
    "qwen_image, ulysses": lambda: check_model("qwen_image", ulysses_degree=WORLD),
    "errors": check_errors,
}


@pytest.mark.parametrize("name", CHECKS)
def test_checks_pass_in_every_process(name, verdicts):
    verdicts.assert_passed(name)
