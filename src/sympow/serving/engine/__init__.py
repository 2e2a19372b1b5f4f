"""Many requests as one batch: `engine.py` is what callers use, `scheduler.py` the thread that owns the model."""
