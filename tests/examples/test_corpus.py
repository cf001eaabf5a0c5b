"""The demo's text: a split that is the same everywhere, reproducible windows, helpful errors."""

import corpus
import pytest
import torch

TEXT = b"def double(x):\n    return 2 * x\n" * 40


@pytest.fixture
def folder(tmp_path):
    for index in range(40):
        (tmp_path / f"module_{index}.py").write_bytes(b"# file %d\n" % index + TEXT)
    return tmp_path


def test_standard_library_is_enough_text_for_the_demo():
    text = corpus.load(None, seq_len=256)
    assert len(text.train) > 4_000_000
    assert 0.05 < len(text.validation) / len(text.train) < 0.2
    assert text.train.dtype == torch.uint8


def test_split_is_by_file_and_repeats(folder):
    first, second = (corpus.load(folder, seq_len=32) for _ in range(2))
    assert torch.equal(first.train, second.train)
    assert torch.equal(first.validation, second.validation)
    held_out = bytes(first.validation.tolist())
    names = [name for name in corpus.find_files(folder, "") if corpus.hash_path(name) % 10 == 0]
    assert 0 < len(names) < 40
    for name in corpus.find_files(folder, ""):
        index = int(name.removeprefix("module_").removesuffix(".py"))
        assert (b"# file %d\n" % index in held_out) == (name in names)


def test_hash_of_a_path_is_the_same_on_every_machine():
    assert corpus.hash_path("json/decoder.py") == 0x43BE9BB7


def test_hidden_binary_and_broken_files_are_left_out(folder):
    before = corpus.load(folder, seq_len=32)
    (folder / ".secret").write_bytes(b"hidden " * 50)
    (folder / "image.png").write_bytes(b"\x89PNG\0\0" * 50)
    (folder / "broken").symlink_to(folder / "nowhere")
    after = corpus.load(folder, seq_len=32)
    assert torch.equal(before.train, after.train)
    assert torch.equal(before.validation, after.validation)


@pytest.mark.parametrize("content", [None, b"", b" \n\n", b"\0\1\2"])
def test_no_text_is_an_error_with_a_remedy(tmp_path, content):
    if content is not None:
        (tmp_path / "file.txt").write_bytes(content)
    with pytest.raises(ValueError, match=r"holds no text.*Give another"):
        corpus.load(tmp_path, seq_len=32)


def test_text_shorter_than_a_window_says_how_much_is_enough(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("too short")
    with pytest.raises(ValueError, match=r"0 for validation.*\(363 bytes are enough\)"):
        corpus.load(path, seq_len=32)
    path.write_text("x" * 363)
    assert len(corpus.load(path, seq_len=32).validation) > 32


def test_batches_are_reproducible_windows_with_shifted_targets():
    split = torch.arange(200, dtype=torch.uint8)
    first, second = (
        next(corpus.batches(split, 4, 16, torch.Generator().manual_seed(7))) for _ in range(2)
    )
    tokens, targets = first
    assert tokens.shape == targets.shape == (4, 16)
    assert tokens.dtype == torch.int64
    assert torch.equal(targets, tokens + 1)
    assert torch.equal(tokens, second[0])
