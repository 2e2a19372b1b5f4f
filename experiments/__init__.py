"""The laboratory: the experiments of the paper and those beyond it, what runs them, and their results.

`python -m experiments` lists them; docs/experiments.md says how to use it. Each question is a file of functions that
take a `Scale` and return what is to be trained: runs of a grid (`grid.py`), or sweeps of small models that are trained
as one (`sweep.py`). `runner.py` trains what is not done, and `store.py` keeps the results.

The library does not import this package.
"""
