"""Starts training processes for the tests: imports once, then forks for every line of JSON on standard input.

Importing torch takes seconds, and a tiny training less than one. This is a separate program, because the test process
has threads and must not fork.
"""

import atexit
import gc
import json
import os
import sys
from importlib import import_module

exit_code = None


@atexit.register
def leave():
    """Ends a training process without taking the interpreter apart, which takes longer than the training itself.

    Threads have ended by now. What others register for the end has run, since this was registered first.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if exit_code is not None:
        os._exit(exit_code)


import sympow.cli.train  # noqa: E402

# Modules that training imports later. An optimizer imports torch._dynamo, which takes longer than the training itself.
LATER = "fsspec safetensors.torch sympow.train.trainer torch._dynamo torch.distributed.checkpoint.filesystem yaml"
for name in LATER.split():
    import_module(name)


def become(request):
    """Runs `python -m sympow.train ARGUMENTS`, after code that injects a failure."""
    os.environ.update(request["environment"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.argv = ["sympow.train", *request["arguments"]]
    global exit_code
    try:
        exec(request["code"], {})
        sympow.cli.train.main()
    except SystemExit as end:
        exit_code = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        exit_code = 1
        raise


if __name__ == "__main__":
    # Objects imported so far are excluded from garbage collection, so that forked processes share their memory.
    gc.freeze()
    while line := sys.stdin.readline():
        request = json.loads(line)
        if "wait" in request:
            pid, status = os.waitpid(request["wait"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                become(request)
                break
        print(json.dumps(answer), flush=True)
