"""`import flash_attn` finds fa_ops after install, and nothing after uninstall."""

import importlib
import importlib.metadata
import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from fa_ops import compat

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("flash_attn") is not None, reason="flash-attn is installed"
)


@pytest.fixture
def installed():
    for name in ("flash_attn", "flash_attn_interface"):
        compat.install(name)
    yield
    for name in ("flash_attn", "flash_attn_interface"):
        compat.uninstall(name)


# What these import: transformers, diffusers, TransformerEngine, Megatron-LM, xformers, verl,
# OpenRLHF, axolotl, ms-swift, ColossalAI, DeepSpeed, llm-foundry, gpt-neox,
# flash-linear-attention, InternLM, ring-flash-attention, long-context-attention, HunyuanVideo, Wan,
# DiffSynth-Studio and FastVideo.
NAMES = {
    "flash_attn": "flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache "
    "flash_attn_qkvpacked_func flash_attn_kvpacked_func flash_attn_varlen_qkvpacked_func "
    "flash_attn_varlen_kvpacked_func __version__ bert_padding flash_attn_interface",
    "flash_attn.bert_padding": "index_first_axis index_put_first_axis pad_input unpad_input "
    "unpad_input_for_concatenated_sequences",
    "flash_attn.flash_attn_interface": "flash_attn_func flash_attn_varlen_func "
    "flash_attn_varlen_qkvpacked_func _flash_attn_forward _flash_attn_backward "
    "_flash_attn_varlen_forward _flash_attn_varlen_backward _wrapped_flash_attn_forward "
    "_wrapped_flash_attn_backward _wrapped_flash_attn_varlen_forward "
    "_wrapped_flash_attn_varlen_backward _get_block_size_n flash_attn_gpu",
    "flash_attn.layers.rotary": "RotaryEmbedding apply_rotary_emb apply_rotary_emb_func "
    "apply_rotary_emb_qkv_ apply_rotary_emb_kv_ ApplyRotaryEmb",
    "flash_attn.ops.triton.rotary": "apply_rotary",
    "flash_attn_2_cuda": "fwd bwd varlen_fwd varlen_bwd fwd_kvcache",
    "flash_attn_interface": "flash_attn_func flash_attn_varlen_func flash_attn_with_kvcache "
    "flash_attn_qkvpacked_func flash_attn_combine get_scheduler_metadata _flash_attn_forward "
    "_flash_attn_backward __version__",
    "flash_attn_3.flash_attn_interface": "flash_attn_func flash_attn_with_kvcache "
    "_flash_attn_forward",
}


@pytest.mark.parametrize("module", NAMES)
def test_names_that_libraries_import(module, installed):
    found = importlib.import_module(module)
    assert found.__name__ == found.__spec__.name == module
    assert not [name for name in NAMES[module].split() if not hasattr(found, name)]


def test_code_runs_unmodified(installed):
    import flash_attn
    from flash_attn import flash_attn_func

    assert flash_attn.flash_attn_interface.flash_attn_func is flash_attn_func
    q = torch.randn(1, 5, 2, 8)
    assert flash_attn_func(q, q, q, causal=True).shape == q.shape


def test_functions_of_einops_are_those_of_einops(installed, monkeypatch):
    from flash_attn import bert_padding

    assert not hasattr(bert_padding, "reduce")
    monkeypatch.setitem(sys.modules, "einops", ModuleType("einops"))
    sys.modules["einops"].rearrange = len
    from flash_attn.bert_padding import rearrange

    assert rearrange is len


def test_modules_can_be_reloaded_and_imported_again(installed):
    flash_attn = importlib.reload(importlib.import_module("flash_attn"))
    assert flash_attn.__spec__.name == "flash_attn"
    assert flash_attn.bert_padding is sys.modules["flash_attn.bert_padding"]
    del sys.modules["flash_attn"]
    assert importlib.import_module("flash_attn").flash_attn_func is flash_attn.flash_attn_func


def test_other_modules_are_not_found(installed):
    with pytest.raises(ModuleNotFoundError, match="flash_attn.losses"):
        import flash_attn.losses  # noqa: F401
    assert importlib.util.find_spec("flash_attn.cute") is None
    assert importlib.util.find_spec("flash_attn").name == "flash_attn"


@pytest.mark.parametrize("module", ["modules.mha", "losses.cross_entropy", "ops.triton.layer_norm"])
def test_imports_of_other_modules_say_what_fa_ops_stands_in_for(module, installed):
    missing = "flash_attn.ops.triton.layer_norm"
    if not module.startswith("ops"):
        missing = f"flash_attn.{module.partition('.')[0]}"
    with pytest.raises(ModuleNotFoundError) as error:
        importlib.import_module(f"flash_attn.{module}")
    text = str(error.value)
    assert text.startswith(f"No module named {missing!r}: fa_ops stands in for flash_attn and has")
    assert error.value.name == missing and "flash_attn.layers.rotary" in text
    assert "flash_attn.ops," not in text and importlib.util.find_spec("flash_attn.modules") is None


def test_metadata(installed):
    version = importlib.metadata.version
    assert version("flash-attn") == version("flash_attn") == "2.8.3"
    assert version("flash-attn-3") == "3.0.0"
    found = importlib.metadata.packages_distributions()
    assert found["flash_attn"] == ["flash_attn"]
    assert found["flash_attn_interface"] == ["flash_attn_3"]
    assert torch.__version__.startswith(version("torch").partition("+")[0])


def test_uninstall_removes_everything():
    before = set(sys.modules), list(sys.meta_path)
    compat.install("flash_attn")
    compat.install("flash_attn")
    assert "flash_attn.layers.rotary" in sys.modules
    compat.uninstall("flash_attn")
    compat.uninstall("flash_attn")
    assert not [name for name in set(sys.modules) - before[0] if name.startswith("flash_attn")]
    assert sys.meta_path == before[1] and importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")


def test_the_real_package_is_not_replaced(monkeypatch):
    real = ModuleType("flash_attn.flash_attn_interface")
    real.__file__ = "/somewhere.py"
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", real)
    with pytest.raises(RuntimeError, match="from /somewhere.py: call install before the first"):
        compat.install("flash_attn")
    assert "flash_attn" not in sys.modules
    compat.uninstall("flash_attn")
    assert sys.modules["flash_attn.flash_attn_interface"] is real


@pytest.mark.parametrize("name", ["xformers", None, ["flash_attn"]])
def test_unknown_names_raise(name):
    for function in (compat.install, compat.uninstall):
        with pytest.raises(
            ValueError, match="flash_attn_interface, ring_flash_attn, got "
        ) as error:
            function(name)
        assert str(error.value).endswith(f"got {name!r}")
