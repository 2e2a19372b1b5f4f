import pytest
from report.made_up import grid, write_run

RECALL = [
    {"pairs": pairs, "nearest": near, "farthest": 4 * near, "accuracy": pairs / 8, "loss": 1.0, "guess": 2.0}
    for pairs in (2, 4)
    for near in (4, 64)
]
PASSKEY = [{"distance": distance, "accuracy": 0.5, "loss": 3.0, "control": 5.0} for distance in (16, 256)]


@pytest.fixture(scope="session")
def experiment(tmp_path_factory):
    """Runs for the paper's figures, with made-up losses: two powers, two contexts, four variants, two seeds."""
    folder = tmp_path_factory.mktemp("experiment")
    heads = {"half_life": [[700.0, 30.0], [None, 2.5]], "beta_mean": [[1.0, 0.4], [1.6, 1.1]]}
    layers = {"half_life/layer_0": 500.0, "half_life/layer_1": 20.0, "beta_mean/layer_0": 0.7}
    for run, place, name, base, settings in grid(powers=(2, 4), contexts=(64, 256)):
        numbers = {"tokens_per_second": 1000.0 * (place + 1)} | (layers if name == "conformal" else {})
        lines = dict.fromkeys((10, 20, 30), numbers) | {40: numbers | {"heldout_loss": base + 0.5}}
        write_run(
            folder / run,
            # A noisy decrease.
            [base + 3 / step + 0.05 * (-1) ** step for step in range(1, 41)],
            lines=lines,
            evaluation=[base + 1 / (n + 1) for n in range(512)],
            probes={"recall": RECALL, "passkey": PASSKEY},
            head_table=heads if name == "conformal" else None,
            batch_tokens=1024,
            **settings,
        )
    return folder
