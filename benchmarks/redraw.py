"""Redraws the figures of saved results of `sympow bench`.

    python benchmarks/redraw.py benchmarks/results/h200_p2.json

A figure is written beside each file, with the ending .png.
"""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path

import torch

from sympow.check.operator import Row, Setting
from sympow.check.timing import Timing
from sympow.errors import UserError
from sympow.parsing import read_json
from sympow.report.figure_files import plot_bench_rows


def load_rows(path: Path) -> tuple[list[Row], Setting]:
    """Reads a file that `sympow bench --out` wrote.

    Raises:
        ValueError: the file is not one of `sympow bench`.
    """
    content = read_json(path)
    try:
        described = content["setting"]
        if missing := [field.name for field in fields(Setting) if field.name not in described]:
            raise UserError(f"{path} lacks {', '.join(missing)} in its setting")
        dtype, *others = (getattr(torch, name) for name in (described["dtype"], *described["other_dtypes"]))
        types = {"dtype": dtype, "other_dtypes": tuple(others), "gating": tuple(described["gating"])}
        setting = Setting(**{**described, **types})
        rows = []
        for row in content["rows"]:
            both = row["forward_and_backward"]
            timed = {"forward": Timing(**row["forward"]), "forward_and_backward": both and Timing(**both)}
            rows.append(Row(**{**row, **timed}))
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} was not written by sympow bench: {error}") from error
    return rows, setting


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, nargs="+", help="JSON files that `sympow bench --out` wrote")
    for path in parser.parse_args().results:
        try:
            rows, setting = load_rows(path)
        except ValueError as error:
            parser.error(str(error))
        plot_bench_rows(rows, setting, path.with_suffix(".png"))
        print(f"wrote {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
