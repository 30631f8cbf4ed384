"""The ways in which a run can end badly. Their messages say what is wrong, where, and what to do."""


class BadInput(ValueError):
    """What the user gave cannot be used: nothing has been done yet."""


class RunFailed(RuntimeError):
    """The run cannot go on; what it saved is intact."""


class RoundAbandoned(RunFailed):
    """A round came to nothing: what was known before it still holds, and it may be tried again."""
