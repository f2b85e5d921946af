import numpy as np
import pytest

from headrace.config import PromptsSection
from headrace.errors import DataError
from headrace.prompts.stream import Renderer


def render(tokenizer, record, **settings):
    return Renderer(tokenizer, PromptsSection(**settings)).render(record, "train-17")


def user(text):
    return {"role": "user", "content": text}


def test_plain_text_gets_the_tokenizers_special_tokens(plain):
    prompt = render(plain, {"prompt": "12+9=", "answer": "21", "id": "x"})
    assert (prompt.id, prompt.text, dict(prompt.fields)) == ("train-17", "12+9=", {"answer": "21", "id": "x"})
    assert prompt.token_ids.dtype == np.int32
    assert plain.decode(prompt.token_ids) == "<s>12+9="


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_text_as_a_chat(chat, mode):
    prompt = render(chat, {"prompt": "12+9="}, chat=mode, system="Be brief.")
    assert chat.decode(prompt.token_ids) == "<s>system:Be brief.<e><s>user:12+9=<e><s>assistant:"
    assert prompt.text == "12+9="


def test_text_never_as_a_chat(chat):
    assert chat.decode(render(chat, {"prompt": "hi"}, chat="never").token_ids) == "<s>hi"


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_messages(chat, key):
    messages = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    prompt = render(chat, {key: messages, "answer": "d"})
    assert chat.decode(prompt.token_ids) == "<s>user:a<e><s>assistant:b<e><s>user:c<e><s>assistant:"
    assert (prompt.text, dict(prompt.fields)) == ("c", {"answer": "d"})
    assert len(messages) == 3


def test_own_prompt_field(plain):
    prompt = render(plain, {"question": "a", "prompt": "b"}, prompt_field="question")
    assert (prompt.text, dict(prompt.fields)) == ("a", {"prompt": "b"})


def test_always_without_template(plain):
    with pytest.raises(DataError, match=r"prompts\.chat = 'always'.*no chat template"):
        Renderer(plain, PromptsSection(chat="always"))


def test_too_long(plain):
    assert len(render(plain, {"prompt": "x" * 9}, max_tokens=10).token_ids) == 10
    with pytest.raises(DataError, match=r"'train-17' has 11 tokens, more than prompts\.max_tokens = 10"):
        render(plain, {"prompt": "x" * 10}, max_tokens=10)


@pytest.mark.parametrize(
    ("record", "settings", "message"),
    [
        ({"prompt": ""}, {}, "'train-17' is empty"),
        ({"prompt": " \n"}, {}, "'train-17' is empty"),
        ({"prompt": [user("")]}, {}, "'train-17' is empty"),
        ({"prompt": []}, {}, "no user message"),
        ({"prompt": [{"role": "system", "content": "x"}]}, {}, "no user message"),
        ({"prompt": 7}, {}, "must be text or a list of messages, not int"),
        ({"prompt": None}, {}, "not NoneType"),
        ({"prompt": ["hello"]}, {}, "message 1 of 'prompt': needs 'role' and 'content'"),
        ({"prompt": [user("a"), {"role": "user"}]}, {}, "message 2"),
        ({"prompt": [user([{"type": "image"}])]}, {}, "message 1"),
        ({"prompt": [user("a"), {"role": "assistant", "content": "b"}]}, {}, "ends with an assistant message"),
        ({"prompt": [user("a")]}, {"chat": "never"}, r"prompts\.chat = 'never'"),
        ({"prompt": "a"}, {"chat": "never", "system": "x"}, r"prompts\.system is set"),
        ({"prompt": [{"role": "system", "content": "x"}, user("a")]}, {"system": "y"}, r"prompts\.system is set"),
        ({"prompt": [user("a"), {"role": "tool", "content": "b"}]}, {}, "refuses it: no tools here"),
        ({"question": "a"}, {}, "no field 'prompt'.*has: question"),
    ],
)
def test_records_that_cannot_be_used(chat, record, settings, message):
    with pytest.raises(DataError, match=message):
        render(chat, record, **settings)


def test_messages_without_template(plain):
    with pytest.raises(
        DataError, match=r"'train-17' is a chat, but the tokenizer has no chat template \(prompts\.chat"
    ):
        render(plain, {"prompt": [user("a")]})


def test_short_texts_need_no_tokenising(plain, chat):
    for tokenizer in (plain, chat):
        renderer = Renderer(tokenizer, PromptsSection(max_tokens=40))
        for length in range(1, 60):
            record = {"prompt": "x" * length}
            if renderer.surely_fits(record):
                assert len(renderer.render(record, "a").token_ids) <= 40
        assert renderer.surely_fits({"prompt": "x"})
        assert not any(map(renderer.surely_fits, ({"prompt": " "}, {"prompt": [user("a")]}, {}, {"prompt": "x" * 99})))
