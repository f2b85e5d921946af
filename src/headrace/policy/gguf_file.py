"""Loads a GGUF file, and corrects what `transformers` gets wrong in it."""

from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from gguf import GGUFReader
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from headrace.errors import ModelError
from headrace.user_code import load_optional

# A file has only llama.cpp's name of its pre-tokenizer. For names it does not know, `transformers`
# takes GPT-2's. That is right for the first set; the second also splits all digits.
AS_GPT2 = {"gpt-2", "phi-2", "mpt", "olmo", "jais"}
DIGITS_ALONE = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def gguf_model(path: Path, **options: Any) -> Any:
    """As `AutoModelForCausalLM.from_pretrained`, with dense weights, to be trained and saved."""
    load_optional("accelerate", "accelerate", "gguf")  # `transformers` needs it for these files
    with redirect_stderr(StringIO()):  # a progress bar that has no switch
        model, info = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, **options)
    if (quantizer := getattr(model, "hf_quantizer", None)) is not None:
        quantizer.remove_quantization_config(model)  # else it cannot be saved, though dense now
    return model, info


def gguf_tokenizer(path: Path, **options: Any) -> Any:
    """The file's tokenizer, with the pre-tokenizer that the file names."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(path.parent, gguf_file=path.name, **options)
    if not isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel):
        return tokenizer  # not a byte-level vocabulary, or a rule that `transformers` knows
    field = GGUFReader(path).get_field("tokenizer.ggml.pre")
    rule = None if field is None else str(field.contents())
    if rule in DIGITS_ALONE:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    elif rule not in AS_GPT2:
        told = f"the rule '{rule}', which Headrace does not know, so its tokens would be wrong"
        raise ModelError(f"{path} splits text by {told}; set model.tokenizer to a directory with the original one")
    return tokenizer
