"""A run that is resumed in another precision: what it says of that, and what it must not promise."""

import json
import re
import warnings

import pytest
from gpt.trainer import Trainer
from workers_gpt import assert_near, configure, train, write_text

from fp8stack.errors import ConfigError, Fp8StackWarning

SAVED = {
    "off": {"opt_level": "off"},
    "off-8": {"opt_level": "off", "optimizer_bits": 8},
    "O2": {"opt_level": "O2"},
    "O2-4": {"opt_level": "O2", "optimizer_bits": 4},
    "O1": {"opt_level": "O1"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changes")
    write_text(folder)
    for name, options in SAVED.items():
        train(folder, **options, run_name=name, steps=2, warmup_steps=1)
    return folder


def go_on(folder, saved, **options):
    """Return a run that is resumed from a checkpoint of SAVED, with two steps to take."""
    path = next((folder / "runs").glob(f"{saved}-[bf]*/checkpoints*/step_00000002"))
    given = {"warmup_steps": 1, "run_name": f"from-{saved}", "out": folder / "again", **options}
    return Trainer(configure(folder, **{"steps": 2, **given}, resume=str(path)))


@pytest.mark.parametrize(
    ("saved", "options", "expected"),
    [
        ("off-8", {"opt_level": "off"}, "was 8, is now 32"),
        ("O2-4", {"opt_level": "O2"}, "was 4, is now 8"),
        ("off", {"opt_level": "off", "optimizer_bits": 4}, "was 32, is now 4"),
        ("O2", {"opt_level": "O1", "optimizer_bits": 4}, "was 8, is now 4"),
    ],
)
def test_other_bits_of_the_optimizer_are_said(folder, saved, options, expected):
    with pytest.warns(Fp8StackWarning, match=f"^--optimizer-bits {expected}: AdamW's") as told:
        go_on(folder, saved, **options).log.close()
    assert len(told) == 1
    with pytest.raises(ConfigError, match=f"^--optimizer-bits {expected}"):
        go_on(folder, saved, **options, strict=True)


def test_a_run_goes_on_with_other_bits(folder):
    expected = train(folder, opt_level="off", optimizer_bits=8, run_name="whole", warmup_steps=1)
    with pytest.warns(Fp8StackWarning, match="--optimizer-bits was 8, is now 32"):
        trainer = go_on(folder, "off-8", opt_level="off", steps=4)
    losses = trainer.run()
    assert len(losses) == 4
    assert_near(losses, expected, "bits")


def test_another_vocabulary_and_other_documents_are_noticed(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("tokenizers")
    from pyarrow import parquet

    def write_rows(count):
        parquet.write_table(
            pyarrow.table({"text": ["a b c d " * 11 * count] * 9}), tmp_path / "x.parquet"
        )

    def write_vocabulary(words):
        vocab = {word: index for index, word in enumerate(words)}
        model = {"type": "WordLevel", "vocab": vocab, "unk_token": "?"}
        content = {"model": model, "pre_tokenizer": {"type": "Whitespace"}, "version": "1.0"}
        (tmp_path / "v.json").write_text(json.dumps(content))

    options = {"opt_level": "off", "data": str(tmp_path), "encoding": str(tmp_path / "v.json")}
    write_vocabulary("?abcd")
    write_rows(9)
    train(tmp_path, **options)
    write_vocabulary("?dcba")
    with pytest.warns(
        Fp8StackWarning, match="--encoding was a tokenizer of CRC-32 .* mean other text"
    ):
        trainer = Trainer(configure(tmp_path, **options, resume="auto"))
    trainer.log.close()
    assert trainer.data.train.left == []
    write_vocabulary("?abcd")
    write_rows(8)
    with pytest.warns(
        Fp8StackWarning, match="--data was .* bytes, is now .* after as many as before"
    ):
        trainer = Trainer(configure(tmp_path, **options, resume="auto"))
    trainer.log.close()
    assert trainer.data.train.left != []
    with warnings.catch_warnings():
        warnings.simplefilter("error", Fp8StackWarning)
        write_rows(9)
        Trainer(configure(tmp_path, **options, resume="auto")).log.close()


def test_documents_that_cannot_be_read_lose_no_step(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = ["for x in range(9): print(x)\n" * 3] * 9
    for name, column in (("a", "text"), ("b", "text")):
        parquet.write_table(pyarrow.table({column: rows}), tmp_path / f"{name}.parquet")
    small = {"eval_batches": 1, "eval_batch_size": 1, "checkpoint_freq": 50, "steps": 16}
    options = {"opt_level": "off", "data": str(tmp_path), "encoding": "bytes", **small}
    expected = train(tmp_path, **options, run_name="whole")
    parquet.write_table(pyarrow.table({"content": rows}), tmp_path / "b.parquet")
    with pytest.raises(ConfigError, match=r"column names don't match.*steps so far are in") as told:
        train(tmp_path, **options)
    step = int(re.search(r"step_(\d+)", str(told.value))[1])
    assert 2 < step < 16
    parquet.write_table(pyarrow.table({"text": rows}), tmp_path / "b.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Fp8StackWarning)  # that the file is another
        assert train(tmp_path, **options, resume="auto") == expected
