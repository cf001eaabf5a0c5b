"""The demo's text: a split that is the same everywhere, reproducible windows, helpful errors."""

import corpus
import pytest
import torch

TEXT = b"def double(x):\n    return 2 * x\n" * 40


def test_split_is_by_file_and_of_texts_only(tmp_path):
    for index in range(40):
        (tmp_path / f"module_{index}.py").write_bytes(b"# file %d\n" % index + TEXT)
    first = corpus.load(tmp_path, seq_len=32)
    (tmp_path / ".secret").write_bytes(b"hidden " * 50)
    (tmp_path / "image.png").write_bytes(b"\x89PNG\0\0" * 50)
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    second = corpus.load(tmp_path, seq_len=32)
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    parts = bytes(first.train.tolist()), bytes(first.validation.tolist())
    for index in range(40):
        held_out = corpus.hash_path(f"module_{index}.py") % 10 == 0
        assert [b"# file %d\n" % index in part for part in parts] == [not held_out, held_out]
    assert corpus.hash_path("json/decoder.py") == 0x43BE9BB7  # the same on every machine


def test_too_little_text_is_an_error_with_a_remedy(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("\0")
    with pytest.raises(ValueError, match=r"holds no text.*Give another"):
        corpus.load(tmp_path, seq_len=32)
    path.write_text("short")
    with pytest.raises(ValueError, match=r"\(363 bytes are enough\)"):
        corpus.load(tmp_path, seq_len=32)
    path.write_text("x" * 363)
    assert len(corpus.load(path, seq_len=32).validation) > 32
