"""sympow's own model in transformers: its config, classes, cache, and conversion to and from `sympow.GPT`."""
