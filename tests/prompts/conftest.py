import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<s>{{ m['role'] }}:{{ m['content'] }}<e>{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def make_tokenizer(*, chat: bool = False) -> PreTrainedTokenizerFast:
    """Characters as tokens; plain text gets a <s> in front, as the tokenizers of many models do."""
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "<e>", *map(chr, range(32, 127))])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="<e>")
    tokenizer.chat_template = TEMPLATE if chat else None
    return tokenizer


@pytest.fixture(scope="session")
def plain():
    return make_tokenizer()


@pytest.fixture(scope="session")
def chat():
    return make_tokenizer(chat=True)
