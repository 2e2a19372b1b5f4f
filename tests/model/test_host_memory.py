"""The memory that a process may use, by the limits of its control groups."""

import os

import pytest
import torch

from sympow import GPTConfig
from sympow.model import accounting
from sympow.model.accounting import check_fits, host_memory

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def system(root, membership, limits):
    """A file system whose process is in groups, with the contents of files of limits by path."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for path, text in limits.items():
        file = root / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.mark.parametrize(
    ("membership", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": "max\n"}, MACHINE),
        ("0::/\n", {"memory.max": "1000000\n"}, 1_000_000),
        # The group of a job within that of its user.
        ("0::/user/job\n", {"user/memory.max": "5000\n", "user/job/memory.max": "max\n"}, 5_000),
        ("0::/user/job\n", {"user/memory.max": "5000\n", "user/job/memory.max": "4000\n"}, 4_000),
        ("0::/hidden/group\n", {"memory.max": "3000\n"}, 3_000),
        ("5:cpu,memory:/job\n1:cpu:/\n0::/\n", {"memory/job/memory.limit_in_bytes": "7000\n"}, 7_000),
        ("5:memory:/job\n", {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, MACHINE),
        ("9:name=systemd:/\n", {"memory.max": "1\n"}, MACHINE),
    ],
)
def test_the_least_limit_counts(tmp_path, membership, limits, expected):
    assert host_memory(system(tmp_path, membership, limits)) == expected


def test_without_control_groups_it_is_the_machines(tmp_path):
    assert host_memory(tmp_path) == MACHINE


def test_a_model_larger_than_the_limit_is_refused(monkeypatch):
    config = GPTConfig(vocab_size=1_000, layers=2, width=64, heads=2)
    check_fits(config, torch.device("cpu"))
    monkeypatch.setattr(accounting, "host_memory", lambda: 15 * config.weights)
    with pytest.raises(ValueError, match=r"GB to train, and there are .* GB of memory"):
        check_fits(config, torch.device("cpu"))
