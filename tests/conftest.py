import os
import shutil

import pytest
import torch

# Without a GPU, kernels run in Triton's interpreter. Triton reads the variable when it is imported.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

# The first of these that is installed is used.
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Chromium has no sandbox when run as root, and no test needs the network.
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; run with -m gpu on a machine that has one")
    config.addinivalue_line("markers", "slow: takes many seconds; `make test-slow` runs these")
    config.addinivalue_line("markers", "index: reads the package index for minutes; run with -m index (make resolve)")


# Files whose slow tests take a minute or more: they start first, so that none of them runs alone at the end.
LONGEST_FILES = (
    "test_fresh_clone.py",
    "test_sm90.py",
    "test_report_in_browser.py",
    "test_targets.py",
    "test_attention.py",
    "test_mixin.py",
    "test_tutorials.py",
)


# Tests of such a file run in one worker, which then starts a server or converts a model once for all of them.
SHARED_FIXTURES = (
    "test_conversion.py",
    "test_server.py",
    "test_server_limits.py",
)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Groups the tests of SHARED_FIXTURES by file, for `--dist loadgroup`: pytest 9.2 drops the marks of xdist."""
    if config.getoption("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            file = nodeid.partition("::")[0]
            return file if os.path.basename(file) in SHARED_FIXTURES else nodeid

    return Groups(config, log)


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


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium. Its scope is a module, since playwright's event loop must not outlive its tests."""
    pytest.importorskip("playwright.sync_api", reason="needs playwright, which comes with the extra dev")
    from playwright.sync_api import sync_playwright

    path = os.environ.get("SYMPOW_BROWSER") or next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"needs a browser: none of {', '.join(BROWSERS)} is installed (Debian: apt install chromium)")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(BROWSER_FLAGS))
        yield chromium
        chromium.close()
