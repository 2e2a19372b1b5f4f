import os

import pytest
import torch

# Without a GPU, Triton's kernels run in its interpreter; it reads this when Triton is first imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def let_the_interpreter_count():
    """Triton 3.6's interpreter takes an array of one entry for a number, which NumPy refuses from 2.4 on."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    patch = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


if not torch.cuda.is_available():
    let_the_interpreter_count()


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; run with -m gpu on a machine that has one")
    config.addinivalue_line("markers", "slow: takes half a minute or more; `make test-slow` runs these")
    config.addinivalue_line("markers", "index: reads the package index for minutes; run with -m index (make resolve)")


def pytest_collection_modifyitems(config, items):
    if "index" not in config.getoption("-m"):
        for item in items:
            if "index" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="reads the package index for minutes: make resolve"))
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
