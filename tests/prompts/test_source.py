import csv
import gzip
import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from headrace.errors import DataError, MissingExtraError
from headrace.prompts.source import open_source

RECORDS = [{"prompt": f"{i}+1=", "answer": str(i + 1), "note": "ä\u2028ö" * i} for i in range(5)]


@pytest.fixture(autouse=True)
def _no_progress_bars():
    datasets.disable_progress_bars()


def opened(path, **kwargs):
    return open_source(str(path), count=10, seed=0, **kwargs)


def write_jsonl(path, lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def everything(source):
    return [dict(source[i]) for i in range(len(source))]


def test_jsonl(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [json.dumps(record, ensure_ascii=False) for record in RECORDS])
    source = opened(path)
    assert everything(source) == RECORDS
    assert source[3] == RECORDS[3]
    for i in (-1, 5):
        with pytest.raises(IndexError):
            source[i]


def test_jsonl_blank_lines_bom_and_no_final_newline(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n  \n{"prompt": "b"}')
    assert everything(opened(path)) == [{"prompt": "a"}, {"prompt": "b"}]


def test_compressed_jsonl(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, RECORDS)).encode()))
    assert everything(opened(path)) == RECORDS


def test_damaged_gzip(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(b"not gzip")
    with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be read"):
        opened(path)
    path.write_bytes(gzip.compress(b'{"prompt": "a"}' * 100)[:-10])
    with pytest.raises(DataError, match="cannot be read"):
        opened(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": ', "line 3: not JSON"),
        ("[1, 2]", "line 3: a JSON object is needed, not list"),
        ("null", "line 3: a JSON object is needed, not NoneType"),
        ('{"question": "x", "answer": "y"}', r"line 3: no field 'prompt' .*has: answer, question"),
    ],
)
def test_bad_line_is_found_when_opening(tmp_path, line, message):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"prompt": "a"}', "", line, '{"prompt": "b"}'])
    with pytest.raises(DataError, match=r"a\.jsonl, " + message):
        opened(path)


def test_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff\xfe"}\n')
    with pytest.raises(DataError, match="line 2: not JSON"):
        opened(path)


def test_other_prompt_field_and_messages(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", ['{"question": "a"}'])
    assert opened(path, prompt_field="question")[0] == {"question": "a"}
    chats = write_jsonl(tmp_path / "b.jsonl", ['{"messages": []}'])
    assert len(opened(chats)) == 1
    with pytest.raises(DataError, match=r"no field 'question' .*has: messages"):
        opened(chats, prompt_field="question")


@pytest.mark.parametrize("text", ["", "\n\n"])
def test_empty_file(tmp_path, text):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=r"a\.jsonl is empty"):
        opened(path)


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.jsonl.gz", "gone.parquet", "gone", "arithmetic"])
def test_missing(tmp_path, name):
    with pytest.raises(DataError, match=name + ".*not there"):
        opened(tmp_path / name)


def test_a_path_that_is_like_another_one(tmp_path):
    write_jsonl(tmp_path / "problems.jsonl", ['{"prompt": "a"}'])
    with pytest.raises(DataError, match=rf"is not there; did you mean '{tmp_path}/problems\.jsonl'\?"):
        opened(tmp_path / "problem.jsonl")


def test_unknown_kind(tmp_path):
    (tmp_path / "a.txt").write_text("prompt\n")
    with pytest.raises(DataError, match=r"not of a known kind; use a \.jsonl"):
        opened(tmp_path / "a.txt")


# ---- JSON and CSV


def write_csv(path, records):
    with path.open("w", encoding="utf-8-sig", newline="") as file:  # as spreadsheets write it
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    return path


LONG = [{"prompt": 'say "hi",\nthen\r\nstop', "answer": ""}, {"prompt": "x" * 200_000, "answer": "ä, ö"}]


@pytest.mark.parametrize("records", [RECORDS, LONG], ids=["plain", "quoted and long"])
def test_csv(tmp_path, records):
    limit = csv.field_size_limit()
    path = write_csv(tmp_path / "a.csv", records)
    assert everything(opened(path)) == records
    packed = tmp_path / "b.csv.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert everything(opened(packed)) == records
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('prompt,answer\n"a\nb",1\n\nc,2,3\n', r"line 5: 3 fields, and the header has 2"),
        ("prompt,answer\na,1\nb\n", "line 3: 1 fields, and the header has 2"),
        ('prompt,answer\na,1\n"b,2\n', "line 3: not CSV"),
        ("question,answer\na,1\n", r"line 2: no field 'prompt' .*has: answer, question"),
        ("prompt;answer\na;1\n", r"line 2: no field 'prompt' .*has: prompt;answer"),
        ("prompt,a,a\nx,1,2\n", "two fields of the header have one name: prompt, a, a"),
        ("prompt,answer\n", "is empty"),
        ("", "is empty"),
    ],
)
def test_bad_csv(tmp_path, text, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=rf"a\.csv.* ?{message}"):
        opened(path)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "with a mark"])
@pytest.mark.parametrize("name", ["a.csv", "a.json"])
def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path, name, mark):
    (tmp_path / name).write_bytes(mark + "prompt\nä\n".encode("latin-1"))
    with pytest.raises(DataError, match=rf"{name}, line 2: not UTF-8 text; save the file as UTF-8"):
        opened(tmp_path / name)


@pytest.mark.parametrize("whole", [RECORDS, {"version": 3, "data": RECORDS}], ids=["a list", "in an object"])
def test_json(tmp_path, whole):
    path = tmp_path / "a.json"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(whole, indent=1, ensure_ascii=False).encode())
    assert everything(opened(path)) == RECORDS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a"},\n{"prompt": ]', r"a\.json, line 2: not JSON"),
        ('{"prompt": "a"}\n{"prompt": "b"}\n', r"a\.json, line 2: not JSON .*one object per line, call it \.jsonl"),
        ('[{"prompt": "a"}, 7]', "record 2: a JSON object is needed, not int"),
        ('[{"prompt": "a"}, {"question": "b"}]', r"record 2: no field 'prompt' .*has: question"),
        ('{"train": [], "test": []}', "one such list; it is an object with 2 lists"),
        ('{"prompt": "a"}', "one such list; it is an object with 0 lists"),
        ("7", "one such list; it is a single value"),
        ('[{"prompt": "a", "x": ' + "[" * 150 + "]" * 150 + "}]", "record 1: .*nested more than 100 deep"),
        ("[" * 50_000, "nested too deep|not JSON"),
        ("[]", "is empty"),
        ("", "is empty"),
    ],
)
def test_bad_json(tmp_path, text, message):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        opened(path)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    chats = [{**record, "meta": {"tags": ["x", "y"]}} for record in RECORDS]
    pq.write_table(pa.Table.from_pylist(chats), path, row_group_size=2)
    source = opened(path)
    assert everything(source) == chats
    with pytest.raises(IndexError):
        source[5]


def test_bad_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_text("nonsense")
    with pytest.raises(DataError, match="cannot be read as Parquet"):
        opened(path)
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    with pytest.raises(DataError, match=r"a\.parquet: no field 'prompt' .*has: answer, question"):
        opened(path)
    pq.write_table(pa.table({"prompt": ["a", "b", None]}), path)
    with pytest.raises(DataError, match="row 3: field 'prompt' is empty"):
        opened(path)
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="is empty"):
        opened(path)


def test_datasets_directory(tmp_path):
    data = datasets.Dataset.from_list(RECORDS)
    data.with_format("numpy").save_to_disk(str(tmp_path / "one"))
    source = opened(tmp_path / "one")
    assert everything(source) == RECORDS
    assert type(source[1]["answer"]) is str
    with pytest.raises(IndexError):
        source[5]
    with pytest.raises(DataError, match=r"no field 'question' .*has: answer, note, prompt"):
        opened(tmp_path / "one", prompt_field="question")


def test_datasets_splits_and_other_directories(tmp_path):
    data = datasets.Dataset.from_list(RECORDS)
    datasets.DatasetDict(train=data, test=data).save_to_disk(str(tmp_path / "both"))
    with pytest.raises(DataError, match=r"several splits; name one: .*both/train, .*both/test"):
        opened(tmp_path / "both")
    assert len(opened(tmp_path / "both" / "train")) == 5
    (tmp_path / "junk").mkdir()
    with pytest.raises(DataError, match="not a directory written by datasets"):
        opened(tmp_path / "junk")


@pytest.mark.parametrize(
    ("spec", "library", "extra", "module"),
    [
        ("a.parquet", "datasets", "data", "source_datasets"),
        ("folder", "datasets", "data", "source_datasets"),
    ],
)
def test_missing_library(tmp_path, monkeypatch, spec, library, extra, module):
    (tmp_path / "folder").mkdir()
    (tmp_path / "a.parquet").write_bytes(b"")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, f"headrace.prompts.{module}", raising=False)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtraError, match=rf"{library} is not installed.*pip install -e '\.\[{extra}\]'"):
        opened(spec)
