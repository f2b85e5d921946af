"""Small random models, so that a first run needs no download."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from headrace.policy.tensor_files import save_model

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"
ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
MAX_POSITIONS = 1024

# The chat model's: a token for every number below 100, few for what its demo says, bytes for anything else.
START, END, CALL, CALLED = "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"
CHAT_WORDS = (
    *("system", "user", "assistant", "tool", "higher: ", "lower: ", "right", "wrong", "error: "),
    *('{"name": "guess", "arguments": {"x": ', "}}", "Find my number, ", " to ", "."),
    '{"name": "guess", "description": "Guess a number.", "parameters": {"properties": {"x": {"type": "integer"}}, '
    '"required": ["x"], "additionalProperties": false, "type": "object"}}',
)
CHAT_TEMPLATE = """\
{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ tool.function | tojson }}{% endfor %}<|im_end|>
{%- endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}{{ m.content or '' }}
{%- for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", "arguments": \
{{ call.function.arguments | tojson }}}</tool_call>{% endfor %}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant{% endif %}"""


def build_demo(directory: Path, seed: int, *, chat: bool = False) -> None:
    """Write a Qwen3 model of 0.4 million random weights and its tokenizer: characters, or one for chats with tools."""
    write_random(directory, seed, chat_tokenizer() if chat else character_tokenizer())


def write_random(directory: Path, seed: int, tokenizer: Any, **shape: float) -> None:
    """Write a random Qwen3 that fits the tokenizer. `shape` overrides fields of its config."""
    ends = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    layers = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 384}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_POSITIONS}
    kind = {"initializer_range": 0.06, "tie_word_embeddings": True, "dtype": "float32"}
    config = Qwen3Config(bos_token_id=None, **(kind | layers | heads | ends | sizes | shape))
    # The caller's random state neither decides the weights nor changes.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config).to(torch.float32)
    model.generation_config = GenerationConfig(**ends, do_sample=True)
    directory.mkdir(parents=True, exist_ok=True)
    save_model(model, tokenizer, directory)


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable ASCII character; decoding gives the text back exactly."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, UNK, *ALPHABET])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    return _tokenizer(backend, eos_token=EOS, unk_token=UNK)


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE with a chat template that shows tools and their calls."""
    backend = Tokenizer(models.BPE())
    numbers = pre_tokenizers.Split(Regex(r"[0-9]{1,2}"), behavior="isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([numbers, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    known: dict[str, Any] = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "vocab_size": 800}
    trainer = trainers.BpeTrainer(special_tokens=[PAD, START, END], show_progress=False, **known)
    backend.train_from_iterator([*CHAT_WORDS, *(str(n) for n in range(100))] * 8, trainer)
    backend.add_tokens([CALL, CALLED])
    return _tokenizer(backend, eos_token=END, extra_special_tokens=[START], chat_template=CHAT_TEMPLATE)


def _tokenizer(backend: Tokenizer, **special: Any) -> PreTrainedTokenizerFast:
    exact = {"clean_up_tokenization_spaces": False, "model_max_length": MAX_POSITIONS}
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, **special, **exact)
