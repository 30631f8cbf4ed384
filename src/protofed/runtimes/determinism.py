"""Operations that a device has no deterministic form of: how they are recognised, and what to do."""

SAYS = "does not have a deterministic implementation"
"""What torch's error says, after the name of the operation."""


def is_not_deterministic(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and SAYS in str(error)


def advice(error: BaseException) -> str:
    operation = str(error).partition(SAYS)[0].strip()
    return (
        f"torch has no deterministic form of {operation} on this device. Use another layer, or set "
        "runtime.deterministic = false: then the last bits of results differ from run to run"
    )
