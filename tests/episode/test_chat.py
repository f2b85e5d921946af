"""The chat bridge: what stands is never changed, what follows is what the template writes."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from chat_templates import GPT2, MARKUP, QWEN, SHAPES, TOOLS, Shape, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from headrace.episode.answer import ParsedAnswer, ToolCall
from headrace.episode.chat import Chat, content_text
from headrace.errors import ChatError

LOOK = ToolCall("look", '{"where": "here and there", "times": 2}')
KINDS = {
    "t": "a tool result",
    "tT": "a tool result after thinking",
    "u": "a user message",
    "uT": "a user message after thinking",
}
CONTROL = sorted(
    {token for shape in SHAPES.values() for token in (*shape.stops, *shape.more)} | {*MARKUP, "<|im_start|>"}
)
CONTENT = st.lists(
    st.sampled_from([*CONTROL, "<|im_", "end|>", "<", " ", "\n\n", "\t", '{"a": [1]}', "'", "é", "漢字", "𒀀", "look"])
    | st.text(max_size=5).filter(lambda text: text.isprintable()),
    max_size=8,
).map("".join)


@cache
def chat_of(name: str, pattern: str = QWEN) -> Chat:
    tokenizer = make_tokenizer(SHAPES[name], pattern)
    return Chat(tokenizer, stops=tokenizer.convert_tokens_to_ids(list(SHAPES[name].stops)))


def text_of(chat: Chat, messages: list[Any], *, go_on: bool = True) -> str:
    """The template's own text, by the library alone."""
    arguments, empty = chat._dialect
    forms = [{**m, "thinking": m.get("reasoning_content")} for m in messages]
    for form in (form for form in forms if form.get("tool_calls")):
        call = {"look": {"where": "here and there", "times": 2}} if arguments is dict else {"look": LOOK.arguments}
        form["content"] = form["content"] or empty
        form["tool_calls"] = [{"function": {"name": "look", "arguments": call["look"]}} for _ in form["tool_calls"]]
    rendered = chat._tokenizer.apply_chat_template(forms, tools=TOOLS, tokenize=False, add_generation_prompt=go_on)
    return str(rendered)


def as_shown(chat: Chat, shape: Shape, history: list[Any], answer: Any, reply: Any) -> str:
    """What a model samples that writes as the template shows it, up to and with the stop token."""
    prompt, alone = text_of(chat, history), text_of(chat, [*history, answer], go_on=False)
    base = prompt if alone.startswith(prompt) else text_of(chat, history, go_on=False)
    said = alone[len(base) :]
    if base != prompt:
        header = prompt[len(base) :]
        shared = next(n for n in range(len(header), -1, -1) if said.startswith(header[:n]) and header[n - 1 : n] != "<")
        said = said[shared:]
    ends = [(said.find(stop), stop) for stop in shape.stops if stop in said]
    if ends:
        at, stop = min(ends)
        return said[:at] + stop
    rest = text_of(chat, [*history, answer, reply])[len(alone) :]
    return said + next((stop for stop in shape.stops if rest.startswith(stop)), "")


def reply_of(kind: str, content: str) -> dict[str, Any]:
    if kind.startswith("t"):
        return {"role": "tool", "content": content, "name": "look", "tool_call_id": "call_0"}
    return {"role": "user", "content": content}


def answer_of(kind: str, content: str = "So be it.") -> ParsedAnswer:
    calls = (LOOK,) if kind.startswith("t") else ()
    return ParsedAnswer("" if calls else content, "Hm, well." if "T" in kind else "", calls)


APPENDING = [(name, kind) for name, shape in SHAPES.items() for kind in KINDS if kind not in shape.rewrites.split()]


@pytest.mark.parametrize("name", SHAPES)
def test_prove_tells_which_replies_append(name: str):
    proof = chat_of(name).prove(TOOLS)
    assert list(proof.rewrites) == [KINDS[kind] for kind in KINDS if kind in SHAPES[name].rewrites.split()]
    assert proof.calls == (name not in ("trailing end", "model turns"))
    assert proof.names_tools == proof.calls


def test_a_proof_speaks_to_the_user():
    text = str(chat_of("opened thinking").prove(TOOLS))
    assert "the chat template of a/model rewrites history after a user message" in text
    assert "rewrites history after a user message" in text
    assert "tool results instead of user messages would append" in text
    assert "cannot show tool calls" in str(chat_of("model turns").prove())
    assert str(chat_of("json calls").prove()) == "the chat template of a/model appends every kind of reply"


def play(chat: Chat, shape: Shape, kind: str, question: str, content: str, cut: bool) -> tuple[Any, ...]:
    """A prompt, the tokens after it, and what the template writes for both."""
    history = [{"role": "user", "content": question}]
    answer, reply = answer_of(kind).message(), reply_of(kind, content)
    sampled = chat.encode(as_shown(chat, shape, history, answer, reply))
    sampled = sampled[:-1] if cut else sampled
    tail = chat.append(history, sampled, answer, [reply], TOOLS)
    return chat.first(history, TOOLS), sampled + tail, text_of(chat, [*history, answer, reply])


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(APPENDING), st.sampled_from([QWEN, GPT2]), CONTENT, CONTENT, st.booleans())
def test_tokens_and_tail_are_what_the_template_writes(
    which: tuple[str, str], pattern: str, question: str, content: str, cut: bool
):
    """Over contents with control tokens: same text, and as many control tokens as with harmless contents."""
    name, kind = which
    chat, shape = chat_of(name, pattern), SHAPES[name]
    prompt, rest, written = play(chat, shape, kind, question, content, cut)
    opened = {"text arguments": "<think>\n", "shown thinking": "" if "T" in kind else "\n"}.get(name, "")
    assert chat._decode(prompt).removesuffix(opened) + chat._decode(rest) == written  # `opened` is never shown
    harmless, after, _ = play(chat, shape, kind, "x", "x", cut)
    assert num_controls(chat, shape, prompt + rest) == num_controls(chat, shape, harmless + after)


def num_controls(chat: Chat, shape: Shape, tokens: list[int]) -> int:
    added = chat._tokenizer.added_tokens_decoder.items()
    controls = {id for id, token in added if token.special or token.content in shape.template}
    return sum(id in controls for id in tokens)


@pytest.mark.parametrize(
    "name", [name for name, shape in SHAPES.items() if shape.rewrites and "t" not in shape.rewrites.split()]
)
def test_a_rewritten_history_is_refused(name: str):
    chat, history = chat_of(name), [{"role": "user", "content": "x"}]
    answer, reply = answer_of("uT").message(), reply_of("u", "y")
    sampled = chat.encode(as_shown(chat, SHAPES[name], history, answer, reply))
    with pytest.raises(ChatError, match="the chat template of a/model rewrites history before a user message: it"):
        chat.append(history, sampled, answer, [reply], TOOLS)
    assert chat.first([*history, answer, reply], TOOLS)


def test_an_answer_need_not_look_as_the_template_shows_it():
    """Other spaces in the call, a control token in the text: only what follows the answer is used."""
    chat, history = chat_of("json calls"), [{"role": "user", "content": "x"}]
    spaced = '<tool_call>{"arguments":{"times":2,  "where":"here"},"name":"look"}</tool_call>'
    for said in (spaced, "<|im_start|>\n" + spaced):
        sampled = chat.encode(said + "<|im_end|>")
        answer = chat.parse(sampled, chat.first(history, TOOLS), TOOLS)
        assert answer.tool_calls == (ToolCall("look", '{"times": 2, "where": "here"}'),)
        tail = chat.append(history, sampled, answer.message(), [reply_of("t", "42")], TOOLS)
        assert chat._decode(tail) == "\n<|im_start|>tool\n42<|im_end|>\n<|im_start|>assistant\n"


def test_an_answer_that_the_template_leaves_as_sampled_appends():
    """It shows an empty block of thinking on the last turn alone: a model that writes none is not rewritten."""
    chat, history = chat_of("empty thinking"), [{"role": "user", "content": "x"}]
    tail = chat.append(history, chat.encode("So.<|im_end|>"), ParsedAnswer("So.").message(), [reply_of("u", "y")])
    assert chat._decode(tail) == "\n<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"


def test_another_stop_token_than_the_templates_is_refused():
    chat, history = chat_of("json calls"), [{"role": "user", "content": "x"}]
    with pytest.raises(ChatError, match=r"does not end the answer with <\|endoftext\|>"):
        chat.append(history, chat.encode("So.<|endoftext|>"), ParsedAnswer("So.").message(), [reply_of("u", "y")])


def test_a_cut_answer_is_closed():
    """Also inside its thinking: the template closes what it shows."""
    chat, history = chat_of("empty thinking"), [{"role": "user", "content": "x"}]
    sampled = chat.encode("<think>\nHm, well")
    answer = chat.parse(sampled, chat.first(history))
    assert answer == ParsedAnswer("", "Hm, well")
    tail = chat.append(history, sampled, answer.message(), [reply_of("t", "y")])
    assert chat._decode(tail) == "\n</think>\n\n<|im_end|>\n<|im_start|>tool\ny<|im_end|>\n<|im_start|>assistant\n"


def test_the_end_of_an_answer_is_not_taken_for_another():
    """A stop token in the generation prompt is none; one that begins as the generation prompt goes on is one."""
    history, reply = [{"role": "user", "content": "x"}], {"role": "user", "content": "y"}
    chat = chat_of("text arguments")  # the prompt goes on with <think>, the chat with <｜end｜>
    tail = chat.append(history, chat.encode("Hm.</think><｜end｜>"), ParsedAnswer().message(), [reply])
    assert chat._decode(tail) == "<｜User｜>y<｜Assistant｜><think>\n"
    tokenizer = make_tokenizer(SHAPES["trailing end"])
    tokenizer.chat_template = tokenizer.chat_template.replace("<|assistant|>\n", "<|assistant|>")
    chat = Chat(tokenizer, stops=tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"]))
    tail = chat.append(history, chat.encode("  So.<|end|>"), ParsedAnswer("So.").message(), [reply])
    assert chat._decode(tail) == "\n<|user|>\ny<|end|>\n<|assistant|>"


def test_a_space_in_front_is_not_added_in_the_middle():
    """Tokenizers that put a space before every text, and take white space after a special token."""
    pieces = ["<unk>", "▁", *map(chr, range(33, 127)), "\n"]
    backend = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.add_special_tokens([AddedToken("<end>", special=True, normalized=False, rstrip=True), "<start>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", unk_token="<unk>")
    tokenizer.chat_template = SHAPES["model turns"].template
    chat, history = Chat(tokenizer), [{"role": "user", "content": "a <end>b"}]
    prompt, sampled = chat.first(history), chat.encode("<end>")
    answer, reply = ParsedAnswer("").message(), {"role": "user", "content": "c<start>"}
    tokens = prompt + sampled + chat.append(history, sampled, answer, [reply])
    assert tokens == chat.first([*history, answer, reply])
    assert "a <end>b<end>" in chat._decode(tokens)
    assert tokens.count(tokenizer.eos_token_id) == 3


def test_a_part_that_is_no_text_is_refused():
    assert (
        content_text({"content": [{"type": "text", "text": "Let me "}, {"type": "text", "text": "see."}]})
        == "Let me see."
    )
    with pytest.raises(ChatError, match=r"a part that is not text: \{'type': 'image_url'"):
        content_text({"role": "user", "content": [{"type": "image_url", "image_url": {}}]})


def test_what_a_template_refuses_is_told():
    with pytest.raises(ChatError, match="cannot show tool calls"):
        chat_of("model turns").first([{"role": "user", "content": "x"}, answer_of("t").message()])
    tokenizer = make_tokenizer(SHAPES["json calls"])
    tokenizer.chat_template = "{{ raise_exception('no ' + messages[0].role) if messages[0].role == 'system' }}x"
    with pytest.raises(ChatError, match="refuses these messages: no system"):
        Chat(tokenizer).first([{"role": "developer", "content": "x"}])
    with pytest.raises(ChatError, match="a message is not valid Unicode"):
        chat_of("json calls").first([{"role": "user", "content": "\ud800"}])
    tokenizer.chat_template = None
    with pytest.raises(ChatError, match="a/model has no chat template"):
        Chat(tokenizer)
