"""The models of the common tests: tiny configs, their model classes and their inputs."""

from __future__ import annotations

import unittest
from types import ModuleType

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedConfig, set_seed

B, S, S_DECODER = 7, 7, 5
FRAMES = 60  # of audio; Whisper's convolutions halve them

_HEADS = "ForSequenceClassification ForTokenClassification ForQuestionAnswering".split()
# Ten times the usual weights, so that attention is not uniform and a wrong scale is noticed; with
# 0.5 sdpa itself exceeds the tolerances of the tests.
_SPREAD = 0.2
_COMMON = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": _SPREAD,
}
_BERT = _COMMON | {
    "hidden_size": 32,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": _SPREAD,
}
_T5 = _COMMON | {
    "d_model": 32,
    "d_ff": 37,
    "d_kv": 8,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "bos_token_id": None,
    "decoder_start_token_id": 0,
}
_WHISPER = _COMMON | {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "num_mel_bins": 16,
    "max_source_positions": FRAMES // 2,
    "max_target_positions": 40,
    "decoder_start_token_id": 85,
    "suppress_tokens": None,
    "init_std": _SPREAD,
}


def _decoder(prefix: str, config: str = "") -> tuple[str, list[str], dict]:
    classes = [prefix + name for name in ("Model", "ForCausalLM", *_HEADS)]
    return config or f"{prefix}Config", classes, _DECODER


# Name -> the config class, the model classes, and the config's sizes.
FAMILIES: dict[str, tuple[str, list[str], dict]] = {
    "llama": _decoder("Llama"),
    "qwen2": _decoder("Qwen2"),
    "qwen3": _decoder("Qwen3"),
    "gemma3": (
        "Gemma3TextConfig",
        ["Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"],
        _DECODER | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    ),
    "mistral": _decoder("Mistral"),
    "bert": (
        "BertConfig",
        ["BertModel", "BertLMHeadModel", "BertForMaskedLM", "BertForMultipleChoice"]
        + ["BertForNextSentencePrediction", *("Bert" + name for name in _HEADS)],
        _BERT,
    ),
    "t5": (
        "T5Config",
        ["T5Model", "T5ForConditionalGeneration", "T5ForQuestionAnswering"],
        _T5,
    ),
    "whisper": ("WhisperConfig", ["WhisperModel", "WhisperForConditionalGeneration"], _WHISPER),
}


class Tester:
    """The model tester that transformers' tests expect: sizes, a config and inputs."""

    batch_size, seq_length, is_training, num_labels, num_choices = B, S, True, 3, 4
    hidden_size, num_hidden_layers, num_attention_heads = 32, 2, 4

    def __init__(self, family: str) -> None:
        name, _, self.sizes = FAMILIES[family]
        self.config_class = getattr(transformers, name)
        self.is_audio, self.has_decoder = family == "whisper", family in ("t5", "whisper")
        if self.has_decoder:
            self.encoder_seq_length = FRAMES // 2 if self.is_audio else S
            self.decoder_seq_length = self.seq_length = S_DECODER

    def get_config(self) -> PreTrainedConfig:
        """A tiny config."""
        return self.config_class(**self.sizes)

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict]:
        """A config and inputs: row i has i + 1 tokens and right padding; audio is not padded."""
        inputs: dict[str, Tensor] = {}
        if self.is_audio:
            inputs["input_features"] = torch.randn(B, self.sizes["num_mel_bins"], FRAMES)
        else:
            inputs["input_ids"] = _tokens(S)
            inputs["attention_mask"] = torch.ones(B, S, dtype=torch.long).tril()
        if self.has_decoder:
            inputs["decoder_input_ids"] = _tokens(S_DECODER)
            inputs["decoder_attention_mask"] = torch.ones(B, S_DECODER, dtype=torch.long)
        return self.get_config(), inputs


def _tokens(length: int) -> Tensor:
    return torch.randint(3, 80, (B, length))


def case(family: str, common: ModuleType) -> type[unittest.TestCase]:
    """The common tests of a family, as a test case of unittest."""
    classes = tuple(getattr(transformers, name) for name in FAMILIES[family][1])
    is_audio = family == "whisper"

    class Case(common.ModelTesterMixin, unittest.TestCase):
        all_model_classes = classes
        is_encoder_decoder = family in ("t5", "whisper")
        test_resize_embeddings = not is_audio  # these tests need input_ids
        if family not in ("bert", "t5", "whisper"):  # as in transformers' own test classes
            _torch_compile_train_cls = classes[1]

        def setUp(self) -> None:
            set_seed(0)
            self.model_tester = Tester(family)

        def _prepare_for_class(self, inputs_dict, model_class, return_labels=False) -> dict:
            inputs = super()._prepare_for_class(inputs_dict, model_class, return_labels)
            if return_labels and is_audio and model_class.can_generate():
                inputs["labels"] = torch.zeros(B, S_DECODER, dtype=torch.long)
            return inputs

    return Case
