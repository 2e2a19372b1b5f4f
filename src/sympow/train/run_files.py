"""Where things stand in a run's folder, for those who write them and those who read them."""

from pathlib import Path

# Where runs are that were not given a folder.
RUNS = Path("runs")
LOCK_FILE = "run.lock"
CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EXPORT = "model"
