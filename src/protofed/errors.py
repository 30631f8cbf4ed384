"""The two ways in which a run can end badly. Their messages say what is wrong, where, and what to do."""


class BadInput(ValueError):
    """What the user gave cannot be used: nothing has been done yet."""


class RunFailed(RuntimeError):
    """The run cannot go on; what it saved is intact."""
