"""Every flag, key, file and trouble that public FP8 guides name runs here, or is answered by what to use instead.

The lists are of four guides (a GPT-2 script, FineWeb-Edu on Slurm, TransformerEngine, bare parameters on any GPU) and
of the programs that people compare with. A word that is missing here was named by none of them.
"""

from pathlib import Path

import pytest
from gpt import config
from gpt.config import parse

import fp8stack

ROOT = Path(config.__file__).parents[2]
FLAGS = """
--use_fp8 | --fp8_format hybrid | --fp8_format e4m3 | --fp8_format e5m2 | --fp8_interval 1
--fp8_margin 1 --fp8_recipe delayed
--use_tensorboard | --run_name x | --checkpoint_freq 5 | --eval_freq 5 | --checkpoint_dir d | --resume latest
--list_checkpoints | --max_lr 1e-3 | --warmup_steps 3 | --total_steps 9 | --no_wandb | --fp8-format hybrid
--fp8-recipe tensorwise | --fp8-recipe delayed | --fp8-recipe mxfp8 | --fp8-recipe blockwise | --auto_batch_size
--norm rmsnorm | --qk-norm | --positions rope | --kv-heads 2 | --attention sdpa | --attention flash
--hellaswag a.jsonl
"""
KEYS = """
dataset: fineweb-edu | dataset: openwebtext | dataset: tinyshakespeare | use_fp8: true | fp8_format: hybrid
max_batch_size: 8 | target_effective_batch_size: 64 | learning_rate: 6e-4 | warmup_steps: 9
fp8_margin: 1, fp8_recipe: delayed
min_lr_ratio: 0.1 | max_grad_norm: 1.0 | use_wandb: false | auto_batch_size: true | fp8_amax_history_len: 1024
fp8_amax_compute_algo: max | fp8_amax_compute_algo: most_recent, fp8_recipe: delayed
USE_FP8: true | FP8_FORMAT: hybrid
FP8_AMAX_HISTORY_LEN: 1024
FP8_AMAX_COMPUTE_ALGO: most_recent, fp8_recipe: delayed | COMPUTE_DTYPE: float16 | COMPUTE_DTYPE: float32
"""
ANSWERED = {
    "fp8_margin: 1": "use --fp8-recipe delayed",
    "num_epochs: 3": "steps: N",
    "penalty_weight: 0.1": "not known here",
    "USE_4BIT_OPTIMIZER: true": "optimizer_bits: 8",
    "auto_batch_size: false": "micro_batch: N",
    "mixed_precision: fp8": "opt_level: O2",
}
PAGES = {  # words of a guide, and what a page says of them
    "migrating": "fineweb_edu_fp8.yaml, openwebtext_adaptive_batch.yaml, test_auto_batch.yaml, train_fp8.py, "
    "submit_fp8.sh, submit_sweep.sh, SWEEP_ID, start_tensorboard.sh, plot_schedule.py, USE_4BIT_OPTIMIZER, margin=1, "
    "NVTE_FUSED_ATTN, accelerate, bitsandbytes, stuck, vocabulary",
    "troubleshooting": "NaN, fp16, slower than bf16, loss is worse, TransformerEngine is not used, "
    "Memory did not fall, divisible by 16, A100, FP8STACK_KERNELS",
    "levels": "mxfp8, nvfp4, delayed, A100, RTX 40, V100, MPS",
    "training": "torchrun, sbatch, --resume latest, compare.py",
}


def words(text):
    return [
        word.strip() for line in text.strip().splitlines() for word in line.strip("| ").split("|")
    ]


@pytest.mark.parametrize("flag", words(FLAGS))
def test_a_guide_s_flag_runs(flag):
    parse(flag.split())


@pytest.mark.filterwarnings("ignore::fp8stack.errors.Fp8StackWarning")
@pytest.mark.parametrize("key", [*words(KEYS), "num_workers: 4"])
def test_a_guide_s_key_runs(key, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "run.yaml").write_text(key.replace(", ", "\n"))
    parse(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("key", ANSWERED)
def test_a_guide_s_key_is_answered(key, tmp_path):
    pytest.importorskip("yaml")
    (tmp_path / "run.yaml").write_text(key.replace(", ", "\n"))
    with pytest.raises(fp8stack.errors.ConfigError, match=ANSWERED[key]):
        parse(["--config", str(tmp_path / "run.yaml")])


@pytest.mark.parametrize("page", PAGES)
def test_a_guide_s_files_and_troubles_are_on_a_page(page):
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().split())
    assert not [word for word in PAGES[page].split(", ") if word not in text]
