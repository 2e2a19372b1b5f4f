"""Redraws the figures of saved results of `sympow bench`.

    python benchmarks/redraw.py benchmarks/results/h200_p2.json

A figure is written beside each file, with the ending .png.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from sympow.check.operator import load_rows
from sympow.report.figure_files import plot_bench_rows


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
