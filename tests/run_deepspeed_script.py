"""Run a script as a process of its own does, without compiling what DeepSpeed does not need for training."""

import runpy
import sys

import deepspeed
import deepspeed.ops

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
