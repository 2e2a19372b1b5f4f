"""The errors that sympow raises for its users, told apart by their types.

Whatever translates an error, the command line into flags and the server into fields of a request, reads its type and
its name, and leaves the message alone.
"""

from __future__ import annotations


class UserError(ValueError):
    """A mistake that a user can correct: a wrong argument, or a file that is damaged or is something else."""


class ArgumentError(UserError):
    """An argument has a value that it must not have.

    Args:
        name: the argument.
        problem: the rest of the message, which goes on after the name, as in "must be at least 1, got 0".
    """

    def __init__(self, name: str, problem: str) -> None:
        # Both are arguments of the exception, so that it can be pickled and raised in another process.
        super().__init__(name, problem)
        self.name, self.problem = name, problem

    def __str__(self) -> str:
        return self.about(self.name)

    def about(self, name: str) -> str:
        """The message with another name of the argument, such as a flag."""
        return f"{name}{'' if self.problem.startswith((',', '=')) else ' '}{self.problem}"


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument has a value of a type that it must not have."""


class StoppedError(Exception):
    """Work that was asked for rightly cannot go on. The message says why."""
