"""`torchrun -m sympow.train`: the command `sympow train` in each process."""

from sympow.cli.errors import reported
from sympow.extras import require


def main() -> None:
    """Entry point of every process."""
    with reported("sympow.train"):
        require("typer", "cli")
        from sympow.cli.train import main as run

        run()


if __name__ == "__main__":
    main()
