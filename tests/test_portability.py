"""What must run on any operating system uses nothing that only POSIX has: the operator, models, training."""

import os
import subprocess
import sys

import pytest

# Python's modules and functions that Windows does not have. Libraries that have been imported keep theirs.
WITHOUT_POSIX = """
import asyncio, concurrent.futures, multiprocessing, os, shutil, signal, subprocess, sys, tempfile, warnings
import numpy, torch, torch.distributed, torch.distributed.checkpoint, torch.distributed.checkpoint.state_dict_saver
import torch.distributed.checkpoint.state_dict, torch.distributed.fsdp, yaml, safetensors.torch
import torch.nn.parallel
for name in ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog"):
    sys.modules[name] = None
absent = ("fork", "getuid", "geteuid", "getgid", "killpg", "setsid", "uname", "pread", "pwrite", "sysconf",
          "sysconf_names", "sched_getaffinity", "mkfifo", "getpgid", "getloadavg", "fchmod", "chown", "sync",
          "O_NONBLOCK", "O_DIRECTORY", "O_NOFOLLOW")
for name in absent:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGALRM", "SIGHUP", "SIGKILL", "SIGUSR1", "SIGUSR2", "SIGCHLD", "pthread_sigmask", "alarm", "setitimer"):
    if hasattr(signal, name):
        delattr(signal, name)
warnings.filterwarnings("ignore", message="the file system of .* has no locks")
"""
USE = """
import sympow
from sympow.generation import text
from sympow.model.storage import load_model
from sympow.train import train
from sympow.train.config import laptop

q = torch.randn(1, 40, 2, 8)
y, state = sympow.attention(q, q, q, return_state=True)
assert torch.allclose(y, sympow.attention(q, q, q, form="recurrent"), atol=1e-5)
small = dict(layers=1, width=32, heads=2, context=32, batch_tokens=128, micro_batch_tokens=128, save_every=2)
config = laptop().changed(**small, data="mqar:pairs=4,length=32", steps=2, tensorboard=False)
train(config, sys.argv[1], device="cpu")
train(config.changed(steps=3), sys.argv[1], device="cpu", resume=True)
model = load_model(sys.argv[1] + "/model")
assert model(torch.zeros(1, 3, dtype=torch.long))[0].isfinite().all()
"""


@pytest.mark.slow
def test_training_and_generation_need_no_posix(tmp_path):
    code = [sys.executable, "-c", WITHOUT_POSIX + USE, str(tmp_path / "run")]
    done = subprocess.run(code, capture_output=True, text=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert "step 3 of 3" in done.stderr
