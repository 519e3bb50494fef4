"""Rows of JSON-lines files, and the place of every fault."""

import gzip

import pytest

from osprey.train.jsonl import read_rows


def test_rows_of_plain_and_compressed_files(tmp_path):
    text = '{"id": 1}\n\n{"id": 2}\n'
    (tmp_path / "a.jsonl").write_text(text)
    with gzip.open(tmp_path / "b.jsonl.gz", "wt") as file:
        file.write(text)
    for name in ("a.jsonl", "b.jsonl.gz"):
        assert list(read_rows(tmp_path / name, ("id",))) == [{"id": 1}, {"id": 2}]


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"id": "\xc3\xa9"}\r\n{"id": 2}\r\n')
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"id": "é"}, {"id": 2}]


def test_another_encoding_is_named_with_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"id": 1}\n{"id": "caf\xe9"}\n')
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: not UTF-8 \(at byte 12 of it\); convert the file"):
        list(read_rows(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("line", "message"),
    [("{oops", "not JSON"), ("[1]", "a JSON object is due"), ('{"name": 1}', "the row has no `id`")],
)
def test_faults_name_file_and_line(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n' + line)
    with pytest.raises(ValueError, match=rf"a\.jsonl, line 2: {message}"):
        list(read_rows(tmp_path / "a.jsonl", ("id",)))
