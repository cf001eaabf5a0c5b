"""benchmarks/resume.py on a CPU: what it writes down, and what it refuses."""

import json

import pytest
import resume
import training_tables


@pytest.mark.slow
def test_a_run_on_a_cpu_goes_on_with_its_bits(tmp_path, capsys):
    output = tmp_path / "records.jsonl"
    arguments = ["--device", "cpu", "--only", "tiny/O2", "--steps", "4", "--output", str(output)]
    assert resume.main(arguments) == 0
    records = [json.loads(line) for line in output.read_text().splitlines()]
    assert [r["variant"] for r in records] == ["default", "--deterministic"]
    for r in records:
        assert (r["value"], r["of"], r["first_other_step"], r["last_loss_off"]) == (2, 2, None, 0)
        assert r["tokens_per_second"] > 0
        assert r["tokens_per_second_resumed"] > 0
    assert "2 of 2 steps with the same loss; " in capsys.readouterr().out


def test_steps_that_differ_are_counted(monkeypatch):
    def train(case, options, out, *more):
        folder = out / "tiny"
        (folder / "checkpoints_fp8" / "step_00000002").mkdir(parents=True)
        late = 0.5 if "--resume" in more else 0
        lines = {
            s: {"loss": 8 - s + late * (s == 4), "tokens_per_second": 9.0} for s in range(1, 5)
        }
        return folder, lines

    monkeypatch.setattr(resume, "train", train)
    options = resume.parse(["--only", "tiny/O2", "--steps", "4"])
    record = resume.measure(options.cases[0], True, options)
    assert (record["value"], record["of"], record["first_other_step"]) == (1, 2, 4)
    assert record["last_loss_off"] == 1 / 8


def test_a_case_that_ended_half_way_has_no_row():
    records = [
        {
            "params": {"model": "gpt2", "level": "O2", "flags": flags}, "variant": variant, "value": 3, "of": 4,
            "tokens_per_second": speed, "tokens_per_second_resumed": speed + 10,
        }
        for flags, variant, speed in (("", "default", 90), ("", "--deterministic", 80), ("--compile", "default", 99))
    ]  # fmt: skip
    assert training_tables.resumed(records)[2:] == [
        "| gpt2, O2 | 3 of 4 | 90 | 3 of 4 | 80 | 11.1 and 10.0 % |"
    ]


def test_a_failure_of_the_application_is_shown(tmp_path):
    options = resume.parse(["--device", "cpu", "--only", "tiny/O2", "--steps", "2"])
    with pytest.raises(RuntimeError, match=r"--model tiny .* failed:\n[^$]*nowhere"):
        resume.train(options.cases[0], options, tmp_path, "--data", "nowhere")


@pytest.mark.parametrize("arguments", [["--steps", "3"], ["--only", "bert/O2"]])
def test_what_cannot_be_measured_is_refused(arguments):
    with pytest.raises(SystemExit):
        resume.parse(arguments)
