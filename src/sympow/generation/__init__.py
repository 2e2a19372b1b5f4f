"""Text generation: prefill into a `Prefix`, decode from it at constant memory, sample, stream text."""
