"""Native layers in data-parallel and sharded training: two processes on a CPU, or two GPUs."""

import pytest
from helpers import need_gpus
from layers import RECIPES
from ranks import start_ranks
from workers_nn import run

from fp8stack.capability import native_recipe


@pytest.mark.gpus
@pytest.mark.slow
@pytest.mark.parametrize("work", ["train_replicas", "train_shards", "train_mixed_shards"])
def test_two_ranks_train_as_one(work, device, tmp_path):
    recipes = RECIPES
    if device == "cuda":
        need_gpus(2)
        recipes = [r for r in RECIPES if native_recipe(r, device)]
    store = str(tmp_path / "store")
    start_ranks(run, (2, store, device, work, recipes), nprocs=2)
