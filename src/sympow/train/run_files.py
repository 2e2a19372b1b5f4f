"""Where things stand in a run's folder, for those who write them and those who read them."""

CONFIG_FILE = "config.yaml"
METRICS_FILE = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
EXPORT = "model"
