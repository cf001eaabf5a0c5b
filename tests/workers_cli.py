"""Self-tests that go wrong in every way, for the doctor to run in processes of their own."""

import os
import signal
import time

from fp8stack.capability import Answer


def hang(rank, device, store):
    time.sleep(600)


def crash(rank, device, store):
    os.kill(os.getpid(), signal.SIGSEGV)


def fail(rank, device, store):
    print("to be seen nowhere")
    raise RuntimeError("no kernel image")


def deny_on_second(rank, device, store):
    return Answer(rank == 0, f"rank {rank}")
