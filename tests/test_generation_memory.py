"""Peak memory of prefill and generation does not depend on the length of the prompt."""

import json
import os
import subprocess
import sys

import pytest

# The first is one segment.
LENGTHS = (200, 20_000)

# Each measurement runs in its own process, since memory that earlier ones left allocated would distort it. The
# processes are forked from one that only imports, because importing takes longer than measuring.
CODE = """
import json, os, resource, sys
import torch
from sympow import GPT, GPTConfig
from sympow.generation.sampling import generate
from benchmarks.peak_memory import PeakMemory

def measure(length, options):
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cache_policy = options.pop("cache_policy", "auto")
    model = GPT(GPTConfig(vocab_size=256, layers=1, width=64, heads=8, **options)).eval()
    prompt = torch.randint(256, (1, length))
    with PeakMemory() as measured:
        found = generate(model, 70, prompt=prompt, segment_size=200, seed=0, cache_policy=cache_policy)
        made = [int(token) for token in found]
    assert len(made) == 70
    # The prompt itself, eight bytes a token, is the caller's.
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - prompt.nbytes
    print(json.dumps({"tensors": measured.peak, "resident": resident}), flush=True)

while line := sys.stdin.readline():
    if os.fork() == 0:
        measure(*json.loads(line))
        break
    if os.wait()[1]:
        sys.exit("measuring failed")
"""


@pytest.fixture(scope="module")
def peaks():
    """Returns a function that measures peak memory for a prompt length and options of the model."""
    process = subprocess.Popen(
        [sys.executable, "-c", CODE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # By default glibc raises the size above which it returns freed blocks to the system, and then keeps some of
        # them, depending on the machine. With these settings, blocks of the size of a tensor are always returned.
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",
            "MALLOC_MMAP_THRESHOLD_": "1048576",
            "MALLOC_TRIM_THRESHOLD_": "1048576",
        },
    )

    def measure(length, **options):
        process.stdin.write(json.dumps([length, options]) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, "measuring failed; its traceback is above"
        return json.loads(answer)

    with process:
        yield measure


@pytest.mark.slow
@pytest.mark.parametrize("power", [2, 4])
def test_a_hundred_times_the_prompt_takes_the_same_memory(peaks, power):
    short, long = (peaks(length, power=power) for length in LENGTHS)
    for what in ("tensors", "resident"):
        assert abs(long[what] / short[what] - 1) < 0.05, f"{what}: {short[what]:,} and {long[what]:,} bytes"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"mixer": "softmax"}, {"cache_policy": "keys"}], ids=str)
def test_the_measurement_would_find_memory_that_grows(peaks, options):
    short, long = (peaks(length, **options) for length in (400, 4_000))
    assert long["tensors"] > 1.5 * short["tensors"]
