import json

import numpy as np
import pytest

from headrace.config import PromptsSection
from headrace.config_file import DEMO
from headrace.errors import DataError
from headrace.prompts.stream import PromptStream


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def numbered(tmp_path, count, name="a.jsonl", **extra):
    return write(tmp_path / name, [{"prompt": f"{i}+1=", "answer": str(i + 1), **extra} for i in range(count)])


def stream(tokenizer, seed=0, **settings):
    return PromptStream(PromptsSection(**{"eval_count": 3, **settings}), tokenizer, seed)


def take(prompts, n):
    return [(serial, prompt.id, prompt.text, prompt.token_ids.tolist()) for serial, prompt in map(_next, [prompts] * n)]


def _next(prompts):
    return prompts.next()


def test_the_last_records_are_held_out_and_never_drawn(tmp_path, plain):
    prompts = stream(plain, source=numbered(tmp_path, 10))
    assert [p.id for p in prompts.held_out] == ["eval-7", "eval-8", "eval-9"]
    assert [p.text for p in prompts.held_out] == ["7+1=", "8+1=", "9+1="]
    drawn = take(prompts, 21)
    assert [serial for serial, *_ in drawn] == list(range(21))
    for epoch in range(3):
        assert {id for _, id, *_ in drawn[7 * epoch : 7 * epoch + 7]} == {f"train-{i}" for i in range(7)}
    assert prompts.num_train == 7
    assert prompts.at(4).id == drawn[4][1]


def test_ids_of_the_records_are_kept(tmp_path, plain):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "id": i} for i in range(5)])
    prompts = stream(plain, source=path, select="in-order")
    assert [p.id for p in prompts.held_out] == ["2", "3", "4"]
    assert [id for _, id, *_ in take(prompts, 4)] == ["0", "1", "0", "1"]


@pytest.mark.parametrize(("ids", "other"), [([1, 1, 2, 3, 4], "record 1"), ([1, 2, 3, 2, 5], "a held-out record")])
def test_an_id_used_twice(tmp_path, plain, ids, other):
    path = write(tmp_path / "a.jsonl", [{"prompt": "a", "id": i} for i in ids])
    with pytest.raises(DataError, match=rf"record 2 has the id '\d', and so has {other}"):
        stream(plain, source=path)


def test_every_record_once_per_epoch_in_a_new_order(tmp_path, plain):
    path = numbered(tmp_path, 53)
    drawn = [id for _, id, *_ in take(stream(plain, source=path), 150)]
    epochs = [drawn[:50], drawn[50:100], drawn[100:]]
    assert all(set(order) == {f"train-{i}" for i in range(50)} for order in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert [id for _, id, *_ in take(stream(plain, seed=1, source=path), 50)] != epochs[0]


@pytest.mark.parametrize("select", ["uniform", "in-order"])
@pytest.mark.parametrize("stop", [0, 1, 6, 7, 8, 20])
def test_resume(tmp_path, plain, stop, select):
    path = numbered(tmp_path, 10)
    expected = take(stream(plain, source=path, select=select), 20)
    first = stream(plain, source=path, select=select)
    before = take(first, stop)
    second = stream(plain, source=path, select=select)
    second.restore(json.loads(json.dumps(first.state())), {})
    assert before + take(second, 20 - stop) == expected
    second.restore({**second.state(), "serial": 5}, {})
    assert take(second, 2) == expected[5:7]


def test_resume_with_other_prompts(tmp_path, plain):
    path = numbered(tmp_path, 10)
    state = stream(plain, source=path).state()
    with pytest.raises(DataError, match="not those of the checkpoint: seed was 0, is 1"):
        stream(plain, seed=1, source=path).restore(state, {})
    with pytest.raises(DataError, match="num_prompts was 7, is 6"):
        stream(plain, source=path, eval_count=4).restore(state, {})
    write(tmp_path / "a.jsonl", [{"prompt": f"{i}+2="} for i in range(10)])
    with pytest.raises(DataError, match="fingerprint was"):
        stream(plain, source=path).restore(state, {})


def test_a_separate_eval_source(tmp_path, plain):
    source, held = numbered(tmp_path, 4, id=None), write(tmp_path / "b.jsonl", [{"prompt": c} for c in "wxyz"])
    prompts = stream(plain, source=source, eval_source=held)
    assert [(p.id, p.text) for p in prompts.held_out] == [("eval-0", "w"), ("eval-1", "x"), ("eval-2", "y")]
    assert prompts.num_train == 4
    with pytest.raises(DataError, match=r"prompts\.eval_source = .* has 4 records, fewer than prompts\.eval_count = 5"):
        stream(plain, source=source, eval_source=held, eval_count=5)


def test_equal_ids_in_a_separate_eval_source_stay_apart(tmp_path, plain):
    source, held = (write(tmp_path / f, [{"prompt": f, "id": i} for i in range(3)]) for f in ("a.jsonl", "b.jsonl"))
    prompts = stream(plain, source=source, eval_source=held, select="in-order")
    assert [p.id for p in prompts.held_out] == ["eval-0", "eval-1", "eval-2"]
    assert prompts.next()[1].id == "0"


def test_too_few_records(tmp_path, plain):
    with pytest.raises(DataError, match=r"has 3 records and prompts\.eval_count = 3 .*none to train on"):
        stream(plain, source=numbered(tmp_path, 3))


@pytest.mark.parametrize(("position", "id"), [(4, "train-4"), (8, "eval-8")])
def test_a_long_prompt_is_refused_before_the_run(tmp_path, plain, position, id):
    records = [{"prompt": "x" * 50 if i == position else "x"} for i in range(10)]
    with pytest.raises(DataError, match=rf"'{id}' has 51 tokens, more than prompts\.max_tokens = 20"):
        stream(plain, source=write(tmp_path / "a.jsonl", records), max_tokens=20)


def test_worked_examples_come_from_training_records(tmp_path, plain):
    records = [{"prompt": f"{i}=", "worked": f"={i}"} for i in range(10)]
    prompts = stream(plain, source=write(tmp_path / "a.jsonl", records))
    examples = prompts.worked(200, np.random.default_rng(0))
    assert {(prompt.text, text) for prompt, text in examples} == {(f"{i}=", f"={i}") for i in range(7)}
    again = prompts.worked(200, np.random.default_rng(0))
    assert [prompt.id for prompt, _ in again] == [prompt.id for prompt, _ in examples]
    assert prompts.state()["serial"] == 0


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"prompt": "2+2=", "completion": "4"}, {("<s>user:2+2=<e><s>assistant:", "4")}),
        (
            {"prompt": [{"role": "user", "content": "hi"}], "completion": [{"role": "assistant", "content": "ho"}]},
            {("<s>user:hi<e><s>assistant:", "ho")},
        ),
        (
            {"messages": [{"role": "assistant" if x in "bd" else "user", "content": x} for x in "abcd"]},
            {
                ("<s>user:a<e><s>assistant:", "b"),
                ("<s>user:a<e><s>assistant:b<e><s>user:c<e><s>assistant:", "d"),
            },
        ),
    ],
)
def test_worked_examples_of_a_file_of_their_own(tmp_path, chat, record, expected):
    prompts, path = numbered(tmp_path, 10), write(tmp_path / "worked.jsonl", [record] * 3)
    section = PromptsSection(source=prompts, eval_count=3)
    drawn = PromptStream(section, chat, 0, worked_source=path).worked(50, np.random.default_rng(0))
    assert {(chat.decode(prompt.token_ids), solution) for prompt, solution in drawn} == expected


def test_a_worked_file_with_a_record_that_has_no_answer_is_refused_at_once(tmp_path, chat):
    records = [{"prompt": "a", "completion": "b"}, {"id": "odd", "prompt": "a", "answer": "b"}]
    section = PromptsSection(source=numbered(tmp_path, 10), eval_count=3)
    with pytest.raises(DataError, match=r"prompt 'odd' of warmstart.source has: answer, id, prompt"):
        PromptStream(section, chat, 0, worked_source=write(tmp_path / "worked.jsonl", records))


def test_a_worked_example_that_cannot_be_a_prompt_is_refused_at_once(tmp_path, chat):
    path = write(tmp_path / "worked.jsonl", [{"messages": [{"role": "assistant", "content": "hi"}]}])
    section = PromptsSection(source=numbered(tmp_path, 10), eval_count=3)
    with pytest.raises(DataError, match=r"prompt 'warmstart-0' has no user message"):
        PromptStream(section, chat, 0, worked_source=path)
    path = write(tmp_path / "worked.jsonl", [{"prompt": "a" * 3000, "completion": "b"}])
    with pytest.raises(DataError, match=r"prompt 'warmstart-0' has \d+ tokens, more than prompts.max_tokens = 1024"):
        PromptStream(section, chat, 0, worked_source=path)


def test_no_worked_examples(tmp_path, plain):
    with pytest.raises(DataError, match=r"warmstart\.steps needs records with an answer in .*has: answer, prompt"):
        stream(plain, source=numbered(tmp_path, 10)).worked(1, np.random.default_rng(0))


def test_a_made_chat_that_is_held_out_is_not_trained_on(tmp_path, chat):
    path = tmp_path / "made.py"
    path.write_text(
        "def tasks(count, seed):\n"
        "    ask = lambda i: [{'role': 'user', 'content': f'{i % 7}?'}]\n"
        "    return [{'messages': ask(i), 'answer': i % 7} for i in range(count)]\n"
    )
    prompts = stream(chat, source=f"{path}:tasks", count=20)
    assert {p.text for p in prompts.held_out} == {"3?", "4?", "5?"}
    assert {prompts.next()[1].text for _ in range(prompts.num_train)} == {"0?", "1?", "2?", "6?"}


def test_a_made_task_never_trains_on_a_held_out_problem(plain):
    task = f"{DEMO.parent}/arithmetic.py:tasks"
    prompts = PromptStream(PromptsSection(source=task, count=3000, eval_count=300), plain, seed=0)
    held = {p.text for p in prompts.held_out}
    drawn = {prompts.next()[1].text for _ in range(prompts.num_train)}
    assert len(prompts.held_out) == 300
    assert 2100 < prompts.num_train < 2700
    assert not held & drawn
    apart = stream(plain, source=task, count=50, eval_source=task, eval_count=50)
    assert [p.text for p in apart.held_out] != [apart.at(i).text for i in range(50)]
