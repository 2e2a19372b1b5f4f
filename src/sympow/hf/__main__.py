"""`python -m sympow.hf`: converts model folders, or runs a program with sympow models registered in transformers.

python -m sympow.hf to-transformers FOLDER OUT
python -m sympow.hf to-native FOLDER OUT
python -m sympow.hf run MODULE [ARGUMENT …]
"""

from __future__ import annotations

import argparse
import runpy
import sys

from sympow.cli.errors import reported
from sympow.hf import convert_to_native, convert_to_transformers

CONVERSIONS = {"to-transformers": convert_to_transformers, "to-native": convert_to_native}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sympow.hf", description="sympow models in transformers.")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, what in (("to-transformers", "native model's"), ("to-native", "transformers model's")):
        command = commands.add_parser(name, help=f"convert a {what} folder")
        command.add_argument("folder", help="the model, with its tokenizer if it has one")
        command.add_argument("out", help="folder to write")
    run = commands.add_parser("run", help="run a module, such as lm_eval, with sympow's models registered")
    run.add_argument("module")
    run.add_argument("arguments", nargs=argparse.REMAINDER)
    chosen = parser.parse_args(arguments)
    if chosen.command == "run":
        # The models are registered: importing this module has imported the package.
        sys.argv = [chosen.module, *chosen.arguments]
        runpy.run_module(chosen.module, run_name="__main__", alter_sys=True)
        return
    with reported(parser.prog, lambda error: parser.error(str(error))):
        CONVERSIONS[chosen.command](chosen.folder, chosen.out)


if __name__ == "__main__":
    main()
