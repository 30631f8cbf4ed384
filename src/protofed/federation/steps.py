"""Steps by name. A server can name the coroutine methods of the installed method, and the five exchanges of a secure
sum where one was agreed on; nothing else.

`train` is the method's own. `base.train` is that of the method that it goes around. `sum.advertise`, `sum.share`,
`sum.add.train`, `sum.agree` and `sum.unmask` are the exchanges of a secure sum over what clients add after training.
"""

import inspect
from typing import Any

from protofed.api.method import Method, Step
from protofed.api.sums import Summand
from protofed.api.task import ClientId
from protofed.engine.around import Around, At
from protofed.methods.families import SumMethod
from protofed.tree import Tree

AnyMethod = Method[Any, Any, Any, Any]


SUM = "sum"


class UnknownStep(LookupError):
    """A method has no step of this name."""


def step_name(method: AnyMethod, step: Step[Any, Any, Any]) -> str:
    """What a step is called that a method asks its clients for. Raises UnknownStep for a function of another kind."""
    if exchange := getattr(step, "exchange", ""):
        adds = getattr(step, "adds", None)
        return f"{SUM}.{exchange}" + ("" if adds is None else f".{step_name(method, adds.step)}")
    if isinstance(step, At) and step.method is method:
        return f"base.{step_name(step.method.base, step.step)}"
    owner, name = getattr(step, "__self__", None), getattr(step, "__name__", "")
    if owner is method and _is_step(method, name):
        return name
    base = getattr(method, "base", None)
    if isinstance(base, Method) and not isinstance(method, Around):
        return f"base.{step_name(base, step)}"
    raise UnknownStep(
        f"{type(method).__name__} asks clients for {name or step!r}, which is not one of its coroutine methods: only "
        "those can be asked for by name"
    )


def step_named(method: AnyMethod, name: str) -> Step[Any, Any, Any]:
    first, _, rest = name.partition(".")
    base = getattr(method, "base", None)
    if first == "base" and rest and isinstance(base, Method):
        step = step_named(base, rest)
        return At(method, step) if isinstance(method, Around) else step
    if rest or not _is_step(method, first):
        raise UnknownStep(f"{type(method).__name__} has no step {name[:80]!r}")
    found: Step[Any, Any, Any] = getattr(method, first)
    return found


def exchange_of(name: str) -> tuple[str, str]:
    """The exchange of a secure sum that a name is of, and the method's step in it; either may be empty."""
    first, _, rest = name.partition(".")
    if first != SUM or not rest:
        return "", name
    exchange, _, step = rest.partition(".")
    return exchange, step


def summand_named(method: AnyMethod, name: str) -> Summand:
    """What clients add in a step."""
    first, _, rest = name.partition(".")
    base = getattr(method, "base", None)
    if isinstance(base, Method) and (isinstance(method, Around) or (first == "base" and rest)):
        return summand_named(base, rest if first == "base" and rest else name)
    try:
        if not isinstance(method, SumMethod):
            raise LookupError
        return method.summand_of(name)
    except LookupError:
        raise UnknownStep(f"clients of {type(method).__name__} add nothing in the step {name[:80]!r}") from None


def message_like(method: AnyMethod, name: str, state: Tree, client: ClientId) -> Tree:
    """A message with the structure of those that clients are sent for this step."""
    first, _, rest = name.partition(".")
    if first != "base":
        return method.message_spec(first, state, client)
    return (
        message_like(method.base, rest, state, client)
        if isinstance(method, Around)
        else method.message_for(state, client)
    )


def _is_step(method: AnyMethod, name: str) -> bool:
    # guard: only-coroutine-methods-by-name
    return not name.startswith("_") and _takes_a_step(inspect.getattr_static(type(method), name, None))


def _takes_a_step(function: Any) -> bool:
    """Whether it is a coroutine function of a client, a message and a memory."""
    return inspect.iscoroutinefunction(function) and len(inspect.signature(function).parameters) == 4
