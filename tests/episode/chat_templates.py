"""Chat templates in a few lines each, one for every way in which those of real models behave."""

from __future__ import annotations

from dataclasses import dataclass, field

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks.",
            "parameters": {
                "type": "object",
                "properties": {"where": {"type": "string"}, "times": {"type": "integer"}},
                "required": ["where"],
            },
        },
    }
]
SYSTEM = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
CALLS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
)
LAST = (  # ns.q: the place of the last user message
    "{% set ns = namespace(q=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.q = loop.index0 %}{% endif %}{% endfor %}"
)
PARAMETERS = (
    "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}"
)


def im(body: str, begin: str = "", head: str = SYSTEM) -> str:
    """Turns between <|im_start|> and <|im_end|>; the newline behind a turn is never sampled."""
    return (
        head + "{% for m in messages %}<|im_start|>{{ m.role }}\n" + body + "<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n" + begin + "{% endif %}"
    )


@dataclass(frozen=True)
class Shape:
    """A template, its stop tokens, and the kinds of replies (t, tT, u, uT; T: after thinking) that rewrite."""

    template: str
    stops: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    rewrites: str = ""
    more: tuple[str, ...] = field(default=())  # further control tokens


SHAPES = {
    # Qwen2.5, Qwen3-Instruct-2507
    "json calls": Shape(im("{{ m.content }}" + CALLS)),
    # Qwen3: an empty block of thinking on the last turn only
    "empty thinking": Shape(
        im(
            "{% if m.role == 'assistant' and (loop.last or (loop.index0 > ns.q and m.reasoning_content)) %}"
            "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}" + CALLS,
            head=LAST + SYSTEM,
        ),
        rewrites="t u uT",
    ),
    # Qwen3.5: the prompt opens the thinking, which goes when the user speaks; XML calls
    "opened thinking": Shape(
        im(
            "{% if m.role == 'assistant' and loop.index0 > ns.q %}<think>\n{{ m.reasoning_content }}\n</think>\n\n"
            "{% endif %}{{ m.content }}" + PARAMETERS,
            begin="<think>\n",
            head=LAST + SYSTEM,
        ),
        rewrites="u uT",
    ),
    # Nemotron 3: the same, but what was never thought is shown as such
    "shown thinking": Shape(
        im(
            "{% if m.role == 'assistant' %}<think>{% if loop.index0 > ns.q and m.reasoning_content %}"
            "{{ '\n' + m.reasoning_content + '\n' }}{% endif %}</think>{% endif %}{{ m.content }}" + PARAMETERS,
            begin="<think>\n",
            head=LAST + SYSTEM,
        ),
        rewrites="uT",
    ),
    # GLM-4: the stop token is the next turn's first; arguments.items()
    "stop opens": Shape(
        LAST + "{% if tools %}<|system|>{{ tools | tojson }}{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|observation|>\n{{ m.content }}{% else %}<|{{ m.role }}|>\n"
        "{% if m.role == 'assistant' %}<think>{% if loop.index0 > ns.q %}{{ m.reasoning_content }}{% endif %}</think>\n"
        "{% endif %}{{ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '\n' }}<tool_call>{{ c.function.name }}\n"
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value>\n"
        "{% endfor %}</tool_call>{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        stops=("<|user|>", "<|observation|>", "<|endoftext|>"),
        rewrites="uT",
        more=("<|assistant|>", "<|system|>"),
    ),
    # gpt-oss: another stop token on the last turn, and one for calls; thinking is a message
    "channels": Shape(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'assistant' %}"
        "{% if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
        "{% for c in m.tool_calls or [] %}<|start|>assistant to=functions.{{ c.function.name }}"
        "<|channel|>commentary json<|message|>{{ c.function.arguments | tojson }}<|call|>{% endfor %}"
        "{% if not m.tool_calls %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
        "{{ '<|return|>' if loop.last else '<|end|>' }}{% endif %}{% else %}"
        "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}",
        stops=("<|return|>", "<|call|>"),
        rewrites="u uT",
        more=("<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
    ),
    # DeepSeek-V3: arguments as text, content None, thinking opened but never shown, none after a tool's output
    "text arguments": Shape(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}{% if m.role == 'assistant' %}<｜Assistant｜>"
        "{% if m.tool_calls %}{% if m.content is not none %}{{ m.content }}{% endif %}<｜tool▁calls▁begin｜>"
        "{% for c in m.tool_calls %}<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.function.name + '\n```json\n' + "
        "c.function.arguments }}\n```<｜tool▁call▁end｜>{% endfor %}<｜tool▁calls▁end｜>"
        "{% else %}{{ m.content }}{% endif %}<｜end｜>{% elif m.role == 'tool' %}"
        "<｜tool｜>{{ m.content }}{% else %}<｜User｜>{{ m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}<｜Assistant｜><think>\n{% endif %}"
        "{# </think> #}",
        stops=("<｜end｜>",),
        more=(
            "<｜Assistant｜>",
            "<｜User｜>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
        ),
    ),
    # Llama 3.x: the whole answer is the call
    "bare call": Shape(
        '{# "parameters": dictionary #}{{ tools | tojson if tools else "" }}{% for m in messages %}'
        '<|h|>{{ m.role }}\n\n{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
        "{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|h|>assistant\n\n{% endif %}",
        stops=("<|eot|>", "<|eom|>"),
        more=("<|h|>",),
    ),
    # Command R7B: markup around the text, a list of calls
    "marked text": Shape(
        "{{ tools | tojson if tools else '' }}{% for m in messages %}<|T|>{{ m.role }}{% if m.role == 'assistant' %}"
        "{% if m.reasoning_content %}<|START_THINKING|>{{ m.reasoning_content }}<|END_THINKING|>{% endif %}"
        "{% if m.content %}<|START_RESPONSE|>{{ m.content }}<|END_RESPONSE|>{% endif %}"
        "{% if m.tool_calls %}<|START_ACTION|>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
        '{"tool_call_id": "0", "tool_name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}'
        "{% endfor %}]<|END_ACTION|>{% endif %}{% else %}{{ m.content }}{% endif %}<|E|>{% endfor %}"
        "{% if add_generation_prompt %}<|T|>assistant{% endif %}",
        stops=("<|E|>",),
        more=("<|T|>", "<|START_THINKING|>", "<|START_RESPONSE|>", "<|START_ACTION|>"),
    ),
    # Mistral: a list to the end of the answer
    "listed calls": Shape(
        im(
            "{{ m.content }}{% if m.tool_calls %}[TOOL_CALLS]{% for c in m.tool_calls %}"
            "{{ '[TOOL_CALLS]' if not loop.first }}{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
            "{% endfor %}{% endif %}"
        ),
        more=("[TOOL_CALLS]", "[ARGS]"),
    ),
    # Phi-3: a token of the template's own behind a chat that is not to be continued; no tools
    "trailing end": Shape(
        "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
        "{{ '<|assistant|>\n' if add_generation_prompt else '<|endoftext|>' }}",
        stops=("<|end|>", "<|endoftext|>"),
        rewrites="t tT",
        more=("<|assistant|>", "<|user|>"),
    ),
    # Gemma 3: another name for the assistant; no tools
    "model turns": Shape(
        "{% for m in messages %}<start>{{ 'model' if m.role == 'assistant' else m.role }}\n"
        "{{ m.content | trim }}<end>\n{% endfor %}{% if add_generation_prompt %}<start>model\n{% endif %}",
        stops=("<end>",),
        rewrites="t tT",
        more=("<start>",),
    ),
}
MARKUP = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # tokens, but not special ones
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
QWEN = r"(?i:'s|'t)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def make_tokenizer(shape: Shape, pattern: str = QWEN) -> PreTrainedTokenizerFast:
    """Byte-level BPE, trained on a few lines, with the shape's control tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    text = ['look at this, then think. {"name": "look", "arguments": {"where": "here"}}\n\n  <|im_end|> im_end'] * 3
    backend.train_from_iterator(
        text, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    special = dict.fromkeys((*shape.stops, *shape.more, "<|im_start|>"))
    backend.add_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKUP])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=shape.stops[0], name_or_path="a/model")
    tokenizer.chat_template = shape.template
    return tokenizer
