"""What modeling code does with its masks, for all models of the installed transformers release."""

from pathlib import Path

import pytest
import tiny_models
import torch
import transformers
from transformers import BeitConfig, BeitModel, InformerConfig, InformerModel

from hf_integration import unsupported_models

MODELS = Path(transformers.__file__).parent / "models"
# Models that call the attention interface, and add their mask to scores in other code.
ADDING = {"beit", "bigbird_pegasus", "informer", "pp_doclayout_v2", "qwen4_exp"}


def found(source: str) -> set[tuple[str, str]]:
    head = "from ...masking_utils import create_causal_mask\n"
    return {(use.kind, use.detail) for use in unsupported_models.uses(head + source)}


CODE = {
    "an argument": (
        """
class Layer:
    def forward(self, x, attention_mask=None):
        return interface(self, x, attention_mask)
class Model:
    def __init__(self):
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
    def forward(self, x, attention_mask):
        attention_mask = attention_mask.bool()
        attention_mask = create_causal_mask(x, attention_mask)
        for layer in self.layers[:2]:
            x = layer(x, attention_mask=attention_mask)
        return x
""",
        set(),
    ),
    "a layer that adds": (
        """
class Layer:
    def forward(self, x, attention_mask=None):
        return x + attention_mask[:, :, :2]
class Model:
    def __init__(self):
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
    def forward(self, x):
        masks = {"full": create_causal_mask(x)}
        for i, layer in enumerate(self.layers):
            x = layer(x, masks["full"])
        return x
""",
        {("add", "x + attention_mask[:, :, :2]"), ("index", "attention_mask[:, :, :2]")},
    ),
    "a method that flips": (
        """
class Model:
    def masks(self, x):
        mask = create_causal_mask(x)
        if mask is not None:
            mask = mask.flip(dims=(-1,))
        return {"full": mask}
    def forward(self, x):
        mask = self.masks(x)["full"]
        mask[:, 0] = True
        return mask
""",
        {("method", "flip"), ("write", "mask[:, 0]")},
    ),
    "a submodule of a submodule": (
        """
def scores(x, mask):
    x += mask.expand(2, -1)
    return torch.where(mask, x, 0)
class Attention:
    def forward(self, x, mask):
        return scores(x, mask)
class Layer:
    def __init__(self):
        self.attention = Attention()
    def forward(self, x, mask):
        return self.attention(x, mask=mask)
class Model:
    def __init__(self):
        self.layer = Layer()
    def forward(self, x):
        return self.layer(x, create_causal_mask(x))
""",
        {("add", "x += mask.expand(2, -1)"), ("method", "expand"), ("function", "where")},
    ),
    "a function chosen by the config": (
        """
class Model:
    def forward(self, x):
        mask_function = create_causal_mask if self.config.window is None else create_window_mask
        mask = mask_function(x)
        return 1.0 - mask
""",
        {("add", "1.0 - mask")},
    ),
    "a branch of eager attention": (
        """
class Model:
    def forward(self, x):
        mask = create_causal_mask(x)
        if self.config._attn_implementation == "eager":
            x = x + mask
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, -1.0)
        else:
            x = x - mask
        return x
""",
        set(),
    ),
}


@pytest.mark.parametrize("name", CODE)
def test_a_mask_is_followed(name):
    source, expected = CODE[name]
    assert found(source) == expected


@pytest.fixture(scope="module")
def all_models() -> dict[str, tuple[bool, set[str]]]:
    """Model -> whether it calls the attention interface, and the kinds of uses of its masks."""
    result = {}
    for file in sorted(MODELS.glob("*/modeling_*.py")):
        source = file.read_text()
        kinds = {use.kind for use in unsupported_models.uses(source)}
        routed, known = result.get(file.parent.name, (False, set()))
        routed = routed or "ALL_ATTENTION_FUNCTIONS" in source
        result[file.parent.name] = (routed, known | kinds)
    return result


def test_every_model_that_adds_or_writes_is_known(all_models):
    """Compact masks work in all other code; this scan gives models that add float masks."""
    routed = {name: kinds for name, (calls, kinds) in all_models.items() if calls}
    assert len(routed) > 300
    assert {name for name, kinds in routed.items() if "add" in kinds} <= ADDING
    assert {name for name, kinds in routed.items() if "write" in kinds} == set()


def test_the_scan_finds_known_uses(all_models):
    """Negative control."""
    assert "method" in all_models["siglip2"][1]
    assert "add" in all_models["bloom"][1] and "write" in all_models["longformer"][1]
    if "gemma4_assistant" in all_models:
        assert "method" in all_models["gemma4_assistant"][1]


@pytest.mark.parametrize("model_type", [*tiny_models.CAUSAL, *tiny_models.ENCODERS])
def test_common_models_keep_compact_masks(model_type):
    config = tiny_models.build(model_type).config
    assert unsupported_models.mask_needs(config) == unsupported_models.MaskNeeds()


def check_output(model, **inputs):
    results = []
    for name in ("eager", "fa_ops"):
        tiny_models.switch(model, name)
        with torch.no_grad():
            results.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(*results[::-1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_beit_adds_its_mask_to_a_position_bias(shared, padded):
    config = BeitConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=32,
        image_size=32, patch_size=8, use_shared_relative_position_bias=shared,
        use_relative_position_bias=not shared, initializer_range=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = BeitModel(config, add_pooling_layer=False).eval()
    for name, parameter in model.named_parameters():
        if "relative_position_bias_table" in name:
            torch.nn.init.normal_(parameter, std=2.0)
    inputs = {"pixel_values": torch.randn(2, 3, 32, 32)}
    if padded and transformers.__version__ >= "5.23":
        inputs["attention_mask"] = torch.ones(2, 17).long()
        inputs["attention_mask"][0, 9:] = 0
    check_output(model, **inputs)


def test_informer_adds_a_part_of_its_causal_mask():
    config = InformerConfig(
        prediction_length=8, context_length=16, lags_sequence=[1], num_time_features=1,
        d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, sampling_factor=1, distil=False, init_std=0.3,
    )  # fmt: skip
    torch.manual_seed(0)
    model = InformerModel(config).eval()
    inputs = dict(
        past_values=torch.randn(2, 17), past_time_features=torch.randn(2, 17, 1),
        past_observed_mask=torch.ones(2, 17), future_values=torch.randn(2, 8),
        future_time_features=torch.randn(2, 8, 1),
    )  # fmt: skip
    results = []
    for name in ("eager", "fa_ops"):
        tiny_models.switch(model, name)
        torch.manual_seed(0)  # the model samples keys
        with torch.no_grad():
            results.append(model(**inputs).last_hidden_state)
    torch.testing.assert_close(*results[::-1], atol=1e-4, rtol=1e-4)
