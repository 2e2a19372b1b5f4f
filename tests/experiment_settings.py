"""Settings of tiny runs for the tests of experiments."""

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
