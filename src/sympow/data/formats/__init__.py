"""Token files on disk, one module per format; each reads a format as a `TokenDataset`."""
