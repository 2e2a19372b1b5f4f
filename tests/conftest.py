import os

import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads the variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; run with -m gpu on a machine that has one")
    config.addinivalue_line("markers", "slow: takes half a minute or more; `make test-slow` runs these")
    config.addinivalue_line("markers", "index: reads the package index for minutes; run with -m index (make resolve)")


# Files whose slow tests take a minute or more: they start first, so that none of them runs alone at the end.
LONGEST_FILES = (
    "test_readme.py",
    "test_sm90.py",
    "test_targets.py",
    "test_mixin.py",
    "test_tutorials.py",
    "test_demo.py",
)


def pytest_collection_modifyitems(config, items):
    if config.getoption("-m") == "slow":
        order = {name: number for number, name in enumerate(LONGEST_FILES)}
        items.sort(key=lambda item: order.get(item.path.name, len(order)))
    if "index" not in config.getoption("-m"):
        for item in items:
            if "index" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="reads the package index for minutes: make resolve"))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
