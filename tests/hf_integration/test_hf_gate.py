"""Registration, and models that bypass the attention interface."""

import importlib
import os
import subprocess
import sys
import warnings

import pytest
import tiny_models
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
)

import hf_integration


def test_registering_again_changes_nothing():
    before = PreTrainedModel.get_correct_attn_implementation
    hf_integration.register()
    assert PreTrainedModel.get_correct_attn_implementation is before
    assert AttentionInterface()["fa_ops"] is hf_integration.fa_ops_attention_forward
    assert AttentionMaskInterface()["fa_ops"] is hf_integration.fa_ops_mask


CONFIG = """
from transformers import AutoModel, LlamaConfig
sizes = dict(hidden_size=32, num_attention_heads=4, num_hidden_layers=1, intermediate_size=8)
config = LlamaConfig(vocab_size=9, **sizes)
def attempt(name):
    try:
        print(AutoModel.from_config(config, attn_implementation=name).config._attn_implementation)
    except ValueError as error:
        print(error)
"""


def printed(code: str) -> list[str]:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return run.stdout.strip().splitlines()


def test_without_the_import_transformers_raises_for_an_unknown_name():
    error, name = printed(CONFIG + "attempt('fa_ops'); import hf_integration; attempt('fa_ops')")
    assert 'attn_implementation="fa_ops"` is not supported' in error
    assert name == "fa_ops"


@pytest.mark.parametrize("model_type", ["bloom", "mpt", "xglm"])
def test_a_model_with_its_own_attention_code_keeps_its_default_with_a_warning(model_type):
    config = tiny_models.config(model_type)
    with pytest.warns(UserWarning, match=r"Model has its own attention code.*'eager' is used"):
        model = AutoModel.from_config(config, attn_implementation="fa_ops").eval()
    assert model.config._attn_implementation == "eager"
    reference = AutoModel.from_config(config, attn_implementation="eager").eval()
    reference.load_state_dict(model.state_dict())
    ids, mask = tiny_models.tokens(), tiny_models.padding()
    with torch.no_grad():
        ours, eager = (m(ids, attention_mask=mask)[0] for m in (model, reference))
    torch.testing.assert_close(ours[mask.bool()], eager[mask.bool()])


LAYERS = """
from torch import nn

class Mixer(nn.Linear):  # attention under any name
    pass
"""
MODELS = """
from layers_of_a_user import Mixer
from transformers import LlamaConfig, PreTrainedModel

class Config(LlamaConfig):
    pass

class Plain(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.mixer = Mixer(config.hidden_size, config.hidden_size)

class Declared(Plain):
    _supports_attention_backend = True
"""


def test_a_class_of_the_user_without_a_sign_of_support_keeps_its_default(tmp_path, monkeypatch):
    """SDPA raises for such a class, whose code may add a bool mask to its scores."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "layers_of_a_user.py").write_text(LAYERS)
    (tmp_path / "models_of_a_user.py").write_text(MODELS)
    models = importlib.import_module("models_of_a_user")
    with pytest.warns(UserWarning, match="Plain has its own attention code.*'eager' is used"):
        model = models.Plain._from_config(models.Config(), attn_implementation="fa_ops")
    assert model.config._attn_implementation == "eager"
    model = models.Declared._from_config(models.Config(), attn_implementation="fa_ops")
    assert model.config._attn_implementation == "fa_ops"
    models.LlamaModel = LlamaModel  # as if it wrapped one
    model = models.Plain._from_config(models.Config(), attn_implementation="fa_ops")
    assert model.config._attn_implementation == "fa_ops"


def test_a_class_that_another_library_derives_keeps_the_implementation():
    """As FSDP2 does with every model."""
    model = tiny_models.build("switch_transformers")
    model.__class__ = type("Sharded", (type(model),), {"__module__": "torch.nn"})
    assert not any(getattr(model, flag) for flag in ("_supports_sdpa", "_supports_flash_attn"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert model.get_correct_attn_implementation("fa_ops") == "fa_ops"


class PoolingAttention(torch.nn.Module):
    """A layer of the user, for which all classes of this module count as doubtful."""


class Doubtful(LlamaModel):
    """Calls the interface without saying so."""


class Declared(LlamaModel):
    """Says that it calls the interface."""

    _supports_attention_backend = True


def test_a_class_beside_attention_of_the_user_declares_that_it_calls_the_interface():
    config = tiny_models.config("llama")
    with pytest.warns(UserWarning, match="call it sets _supports_attention_backend = True"):
        model = Doubtful._from_config(config, attn_implementation="fa_ops")
    assert model.config._attn_implementation == "sdpa"
    model = Declared._from_config(config, attn_implementation="fa_ops")
    assert model.config._attn_implementation == "fa_ops"


def test_a_model_with_its_own_attention_code_gets_float_masks():
    model = tiny_models.build("bloom")
    ids, mask = tiny_models.tokens(), tiny_models.padding()
    with torch.no_grad():
        eager = model(ids, attention_mask=mask).logits
        model.config._attn_implementation_internal = "fa_ops"
        forced = model(ids, attention_mask=mask).logits
    torch.testing.assert_close(forced, eager)


def test_a_dictionary_sets_the_implementation_of_a_submodel():
    model = tiny_models.build("bart")
    model.set_attn_implementation({"": "eager"})
    assert model.config._attn_implementation == "eager"
    model.set_attn_implementation("fa_ops")
    assert model.config._attn_implementation == "fa_ops"


def test_a_config_class_outside_transformers_gets_dense_masks():
    class Unknown(LlamaConfig):
        model_type = "unknown_llama"

    config = Unknown.from_dict(tiny_models.config("llama").to_dict())
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM._from_config(config, attn_implementation="fa_ops").eval()
    hf_integration.mask_counts.clear()
    model(tiny_models.tokens())
    assert hf_integration.mask_counts == {"dense: an unknown architecture": 1}


def test_dictionaries_of_the_user_are_neither_read_nor_written(monkeypatch):
    """An auto mapping beside a class of the user; a mapping whose `get` raises stands for any."""

    class Mapping(dict):
        def get(self, *args):
            raise TypeError("no such key")

    table = {"eager": int}
    monkeypatch.setattr(sys.modules[__name__], "AUTO", Mapping(), raising=False)
    monkeypatch.setattr(sys.modules[__name__], "TABLE", table, raising=False)

    class Mine(LlamaForCausalLM):
        _supports_attention_backend = True

    model = Mine(tiny_models.config("llama"))
    model.set_attn_implementation("fa_ops")
    assert model.config._attn_implementation == "fa_ops"
    assert table == {"eager": int}


def test_an_import_that_fails_within_transformers_says_why(tmp_path):
    """Here torchvision, which transformers imports lazily, cannot be imported."""
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision/__init__.py").write_text("raise RuntimeError('no operator nms')\n")
    info = tmp_path / "torchvision-0.29.1.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        "Metadata-Version: 2.1\nName: torchvision\nVersion: 0.29.1\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", "import hf_integration"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    assert "no operator nms" in run.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "package, version, user",
    [
        ("transformers", "5.16.2", "hf_integration"), ("transformers", "5.17.0", ""),
        ("transformers", "6.0.0", ""), ("diffusers", "0.41.9", "hf_integration.diffusers"),
        ("diffusers", "0.42.0", ""),
    ],
)  # fmt: skip
def test_only_an_older_release_is_said_to_be_too_old(package, version, user, tmp_path):
    """The package has the errors of a lazy import: the cause is two errors below the last."""
    name, package = package, tmp_path / package
    package.mkdir()
    package.joinpath("__init__.py").write_text(
        "try:\n"
        "    try:\n"
        "        raise RuntimeError('no operator nms')\n"
        "    except RuntimeError as error:\n"
        "        raise ValueError('no module') from error\n"
        "except ValueError as error:\n"
        "    raise ImportError('no name') from error\n"
    )
    info = tmp_path / f"{name}-{version}.dist-info"
    info.mkdir()
    info.joinpath("METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    path = os.pathsep.join([str(tmp_path), *sys.path])
    run = subprocess.run(
        [sys.executable, "-c", f"import hf_integration{'.diffusers' * (name == 'diffusers')}"],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path},
    )  # fmt: skip
    last = run.stderr.strip().splitlines()[-1]
    if user:
        oldest = {"transformers": "5.17", "diffusers": "0.42"}[name]
        expected = f"{user} needs {name} {oldest} or later, found {version}: "
        assert last.endswith(f"{expected}pip install '{name}>={oldest}'")
    else:
        assert f"{name} {version} cannot be imported: no operator nms" in last
    assert "ImportError: no name" in run.stderr
