"""Reading sources: every kind, and complaints that name file, row, field and value."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_mc.config.data import HfSource, JsonlSource, ParquetSource, ReasoningGymSource
from grpo_mc.data.source_jsonl import read_jsonl
from grpo_mc.data.sources import read_records

ROWS = [{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}, {"prompt": "c", "answer": None}]
VERL = {
    "data_source": "math",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 4, "split": "train"},
}


def jsonl(path: Path, **options) -> JsonlSource:
    return JsonlSource(kind="jsonl", path=str(path), **options)


def save_to_disk(folder: Path, batches: list[list[dict]], **state) -> Path:
    """What datasets 5 writes: Arrow streams named by state.json."""
    folder.mkdir(parents=True)
    names = []
    for at, rows in enumerate(batches):
        table = pa.Table.from_pylist(rows)
        names.append(f"data-{at:05}-of-{len(batches):05}.arrow")
        with pa.OSFile(str(folder / names[-1]), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    full = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_format_type": None, **state}
    (folder / "state.json").write_text(json.dumps(full))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_jsonl(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(ROWS[0]).encode() + b"\n\n  \r\n" + json.dumps(ROWS[1]).encode())
    first, second = read_records(jsonl(path))
    assert first.fields == ROWS[0] and (first.row, first.where) == (0, f"{path} line 1")
    assert second.fields == ROWS[1] and (second.row, second.where) == (1, f"{path} line 4")
    assert len(read_records(jsonl(path, limit=1))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"prompt": "a"}\n{"prompt": \n', r"p.jsonl line 2: not valid JSON .*: {\"prompt\":; give one object a line"),
        (b'["a"]\n', r'p.jsonl line 1: holds \["a"\], a JSON object with named fields is needed'),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', r"p.jsonl line 2: byte 12 is not UTF-8"),
        (b"\n \n", r"p.jsonl: there is no usable row"),
        (b"", r"p.jsonl: there is no usable row"),
    ],
)
def test_bad_lines_are_named(tmp_path, content, message):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_records(jsonl(tmp_path / "p.jsonl"))


def test_deeply_nested_json_is_one_clear_error(tmp_path):
    """A RecursionError from the JSON reader, or later from what copies the value."""
    for depth in (150, 100_000):
        path = tmp_path / "deep.jsonl"
        path.write_text('{"prompt": "a"}\n{"prompt": ' + "[" * depth + "]" * depth + "}\n")
        with pytest.raises(ValueError, match="deep.jsonl line 2: not valid JSON .*nested deeper than 100 levels"):
            list(read_jsonl(str(path)))


def test_limit_does_not_read_on(tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\nbroken\n')
    assert len(read_records(jsonl(tmp_path / "p.jsonl", limit=1))) == 1


def test_parquet_file_and_folder(tmp_path):
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "b.parquet")
    pq.write_table(pa.Table.from_pylist([VERL]), tmp_path / "a.parquet")
    records = read_records(ParquetSource(kind="parquet", path=str(tmp_path / "b.parquet")))
    assert [record.fields for record in records] == ROWS
    assert records[2].where == f"{tmp_path / 'b.parquet'} row 2"
    records = read_records(ParquetSource(kind="parquet", path=str(tmp_path)))
    assert [record.fields for record in records] == [VERL, *ROWS]
    assert (records[1].row, records[1].where) == (1, f"{tmp_path / 'b.parquet'} row 0")


def test_broken_parquet_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no Parquet file"):
        read_records(ParquetSource(kind="parquet", path=str(tmp_path)))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 nonsense")
    with pytest.raises(ValueError, match="x.parquet: not a readable Parquet file"):
        read_records(ParquetSource(kind="parquet", path=str(tmp_path / "x.parquet")))
    pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match="no usable row"):
        read_records(ParquetSource(kind="parquet", path=str(tmp_path / "x.parquet")))


def test_hf_dataset_and_its_only_split(tmp_path):
    save_to_disk(tmp_path / "d" / "train", [ROWS[:2], ROWS[2:], [VERL]])
    records = read_records(HfSource(kind="hf", path=str(tmp_path / "d" / "train")))
    assert [record.fields for record in records] == [*ROWS, VERL]
    assert records[2].row == 2 and records[2].where.endswith("data-00001-of-00003.arrow row 0")
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert len(read_records(HfSource(kind="hf", path=str(tmp_path / "d")))) == 4
    (tmp_path / "d" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ValueError, match="splits train, test; give the folder of one of them"):
        read_records(HfSource(kind="hf", path=str(tmp_path / "d")))


def test_broken_hf_folders_are_named(tmp_path):
    def refuse(folder, message):
        with pytest.raises(ValueError, match=message):
            read_records(HfSource(kind="hf", path=str(folder)))

    refuse(tmp_path / "none", "there is no state.json")
    outside = [{"filename": "../x.arrow"}]
    refuse(save_to_disk(tmp_path / "a", [ROWS], _data_files=outside), r"names '../x.arrow', which is no file of")
    refuse(save_to_disk(tmp_path / "b", [ROWS], _indices_data_files=[{}]), "flatten_indices")
    folder = save_to_disk(tmp_path / "c", [ROWS])
    (folder / "data-00000-of-00001.arrow").write_bytes(b"nonsense" * 20)
    refuse(folder, "not a readable Arrow file")
    (folder / "state.json").write_text("{")
    refuse(folder, "not valid JSON")


def test_reasoning_gym_fields_and_verifier():
    options = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    source = ReasoningGymSource(kind="reasoning_gym", task="chain_sum", options=options, size=20, seed=7)
    records = read_records(source)
    assert len(records) == 20 and [record.row for record in records] == list(range(20))
    fields = records[1].fields
    assert fields["expression"] == "58 + 26" and fields["answer"] == "84" and "58 + 26 =" in fields["question"]
    assert records[1].where == "reasoning_gym chain_sum (seed 7) problem 1"
    import reasoning_gym

    scorer = reasoning_gym.get_score_answer_fn("chain_sum")
    assert scorer("84", pickle.loads(pickle.dumps(fields["entry"]))) == 1.0
    assert [record.fields for record in read_records(source)] == [record.fields for record in records]


def test_entry_keeps_the_tuples_that_a_verifier_compares():
    """arc_agi's verifier gives a right answer 0.05 once the entry has been through JSON."""
    import reasoning_gym

    (record,) = read_records(ReasoningGymSource(kind="reasoning_gym", task="arc_agi", size=1, seed=3))
    entry = pickle.loads(pickle.dumps(record.fields["entry"]))
    assert reasoning_gym.get_score_answer_fn("arc_agi")(entry["answer"], entry) == 1.0


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_sums", {}, "there is no task 'chain_sums' .* did you mean 'chain_sum'"),
        ("chain_sum", {"min_term": 2}, "refuses the options .*min_term"),
        ("chain_sum", {"min_terms": 0}, "refuses the options .*min_terms must be positive"),
    ],
)
def test_reasoning_gym_mistakes_are_named(task, options, message):
    with pytest.raises(ValueError, match=message):
        read_records(ReasoningGymSource(kind="reasoning_gym", task=task, options=options, size=3))
