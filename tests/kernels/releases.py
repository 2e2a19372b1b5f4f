"""Compiles every kernel for sm_90 with each supported release of Triton, without a GPU, and compares the results.

python tests/kernels/releases.py            all of them, as a table in Markdown (minutes for each)
python tests/kernels/releases.py 3.7.1 ...  these alone

Each release is downloaded by pip into a temporary folder. The exit status is 1 if any kernel does not compile.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

# The versions that come with supported releases of torch, and those for which the Hopper kernels are enabled.
RELEASES = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
TOOL = Path(__file__).parent / "sm90.py"
SOURCE = Path(__file__).parents[2] / "src"
LINE = re.compile(r"(.{36}) registers +(\d+) stack +(\d+) shared +(\d+) wgmma +(\d+) carried (\d+)( +SERIALIZED)?")


def table_of(release: str, folder: Path) -> dict[str, str]:
    """Resources of each kernel compiled with a release: registers / bytes of stack / KiB of shared memory."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    subprocess.run([*pip, f"triton=={release}"], check=True)
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": f"{folder}{os.pathsep}{SOURCE}",
        "TRITON_CACHE_DIR": str(folder / "cache"),
    }  # fmt: skip
    tool = subprocess.run([sys.executable, str(TOOL), "--all"], env=environment, capture_output=True, text=True)
    if not tool.stdout:
        raise RuntimeError(f"Triton {release} compiled nothing:\n{tool.stderr[-2000:]}")
    table = {}
    for line in tool.stdout.splitlines():
        found = LINE.match(line)
        if found is None:
            table[line[:36].strip()] = "does not compile"
            continue
        name, registers, stack, shared, _, _, serialized = found.groups()
        table[name.strip()] = f"{registers} / {stack} / {int(shared) // 1024}{', serialized' if serialized else ''}"
    return table


def main(releases: list[str]) -> int:
    tables = {}
    for release in releases:
        with tempfile.TemporaryDirectory() as folder:
            tables[release] = table_of(release, Path(folder))
        print(f"Triton {release}: {len(tables[release])} kernels", file=sys.stderr, flush=True)
    print(f"| kernel | {' | '.join(releases)} |")
    print(f"|---|{'---|' * len(releases)}")
    for name in tables[releases[0]]:
        print(f"| {name} | {' | '.join(tables[release].get(name, '') for release in releases)} |")
    return int(any("does not compile" in table.values() for table in tables.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(RELEASES)))
