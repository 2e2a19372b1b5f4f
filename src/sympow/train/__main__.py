"""`torchrun -m sympow.train`: the command `sympow train` in each process."""

from sympow.train.cli import main

if __name__ == "__main__":
    main()
