"""Answers that are bound to a tool call can be read, for every way to write calls; or the model is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chat_templates import SHAPES, TOOLS, make_tokenizer

from headrace.episode.chat import Chat
from headrace.errors import ChatError
from headrace.policy.grammar_llguidance import Grammars

WRITE_JSON = {"json calls", "empty thinking", "bare call", "marked text"}


@pytest.mark.parametrize("name", list(SHAPES))
def test_a_forced_call_can_be_read(name: str):
    tokenizer = make_tokenizer(SHAPES[name])
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in SHAPES[name].stops]
    chat = Chat(tokenizer, stops=stops)
    if name not in WRITE_JSON:
        with pytest.raises(ChatError, match="does not write tool calls as JSON"):
            chat.call_grammar(TOOLS)
        return
    grammar = chat.call_grammar(TOOLS)
    grammars, rng, sampled = Grammars(tokenizer, len(tokenizer), stops), np.random.default_rng(0), list[int]()
    while not sampled or sampled[-1] not in stops:
        allowed = np.flatnonzero(grammars.allowed(grammar, sampled))
        closing = [id for id in allowed if '"' in tokenizer.decode([id])]  # a random text would never end
        sampled.append(int(rng.choice(closing if closing and rng.random() < 0.5 else allowed)))
    answer = chat.parse(sampled, chat.first([{"role": "user", "content": "Look."}], TOOLS), TOOLS)
    assert not answer.error
    (call,) = answer.tool_calls
    assert call.name == "look"
    assert json.loads(call.arguments).keys() <= {"where", "times"}
