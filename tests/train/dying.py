"""`python -m sympow.train`, with one process that kills itself in the first attempt."""

import os
import signal

import sympow.cli.train
from sympow.train import loop

step = loop.Training.step


def dying(self, batch):
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if first and os.environ["RANK"] == os.environ["DYING_RANK"] and self.step_number == int(os.environ["DYING_STEP"]):
        os.kill(os.getpid(), signal.SIGKILL)
    return step(self, batch)


loop.Training.step = dying
if __name__ == "__main__":
    sympow.cli.train.main()
