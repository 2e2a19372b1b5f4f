"""Settings of tiny runs and sweeps for the tests of experiments."""

from experiments.recall import RecallSweep

TINY = {
    "layers": 1,
    "width": 16,
    "heads": 2,
    "context": 32,
    "batch_tokens": 64,
    "micro_batch_tokens": 64,
    "steps": 20,
    "warmup_steps": 0,
    "log_every": 4,
    "save_every": 0,
}
TINY_RECALL = RecallSweep(
    "tiny",
    {"layers": 1, "width": 8, "heads": 2, "gating": "scalar", "rotary": "fixed", "short_conv": 3},
    learning_rates=(1e-3, 1e-2),
    seeds=(0, 3),
    steps=6,
    rows=4,
    warmup=1,
    evaluation_rows=8,
    mixture=((8, 1), (16, 2)),
    weights=(1, 1),
    evaluation=((8, 2), (16, 3)),
    tokens_known=16,
)
