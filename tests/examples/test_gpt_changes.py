"""What a run that is resumed says of what is asked for otherwise, and what it must not promise."""

import re
import warnings

import pytest
from gpt.trainer import Trainer
from workers_gpt import assert_near, configure, step_of, train

from fp8stack.errors import ConfigError, Fp8StackWarning

SAVED = {
    "off": {"opt_level": "off"},
    "off-8": {"opt_level": "off", "optimizer_bits": 8},
    "O2": {"opt_level": "O2"},
    "O2-4": {"opt_level": "O2", "optimizer_bits": 4},
}


@pytest.fixture(scope="module")
def saved(folder):
    return {name: train(folder, **options, run_name=name) for name, options in SAVED.items()}


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("O2", {"seq_len": 8}, "--seq-len was 16, is now 8: windows are cut otherwise"),
        ("O2", {"target_effective_batch_size": 8}, "batch-size was 4, is now 8: steps take another"),
        ("O2", {"steps": 5}, "--steps was 4, is now 5: from here on the learning rate is"),
        ("O2", {"weight_decay": 0.5}, "--weight-decay was 0.1, is now 0.5: matrices decay by it"),
        ("off-8", {"optimizer_bits": None}, "^--optimizer-bits was 8, is now 32: AdamW's"),
        ("O2-4", {"optimizer_bits": None}, "^--optimizer-bits was 4, is now 8: AdamW's"),
        ("off", {"optimizer_bits": 4}, "^--optimizer-bits was 32, is now 4: AdamW's"),
    ],
)  # fmt: skip
def test_a_resumed_run_says_what_is_asked_for_otherwise(folder, saved, name, changes, said):
    options = {**SAVED[name], "resume": str(step_of(folder, name)), "out": folder / "again"}
    options |= {"run_name": name, **changes}
    with pytest.warns(Fp8StackWarning, match=said) as told:
        trainer = Trainer(configure(folder, **options))
    assert len(told) == 1
    decays = [group["weight_decay"] for group in trainer.optimizer.param_groups]
    assert decays == [changes.get("weight_decay", 0.1), 0.0]
    with pytest.raises(ConfigError, match=said):
        Trainer(configure(folder, **options, strict=True))
    if "optimizer_bits" in changes:
        assert_near(trainer.run(), saved[name], changes)
    trainer.log.close()


def test_other_data_is_read_from_its_beginning(folder, saved):
    options = {"run_name": "O2", "resume": str(step_of(folder, "O2")), "out": folder / "moved"}
    (folder / "other.txt").write_text("".join(f"y = {n}\n" for n in range(999)))
    expected = r"--data was text.txt \(\d+ tokens\), is now other.txt .*read from its beginning"
    with pytest.warns(Fp8StackWarning, match=expected) as told:
        trainer = Trainer(configure(folder, **options, data=str(folder / "other.txt"), seed=3))
    assert len(told) == 1
    assert (trainer.step, trainer.data.train.position) == (2, 0)
    trainer.log.close()


def test_documents_that_cannot_be_read_lose_no_step(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = ["for x in range(9): print(x)\n" * 3] * 9
    for name in ("a", "b"):
        parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{name}.parquet")
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
