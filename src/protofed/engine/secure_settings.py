"""`[secure]`: whether the server is given sums over clients and no upload by itself."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge, Interval

from protofed.errors import BadInput

if TYPE_CHECKING:
    from protofed.engine.secure import SecureSums
    from protofed.privacy.exchanges import Terms


@dataclass(frozen=True)
class SecureSettings:
    """What the server learns of uploads. All of each by default, as without this section."""

    sums: bool = False
    """Whether the server is given the sum over clients alone. Clients add whole numbers under masks that cancel in the
    sum. Only for methods whose server needs no more."""
    threshold: Annotated[float, Interval(ge=0.67, le=1)] = 0.67
    """The share of the clients of a round that must stay to its end; with fewer it is abandoned. Always more than two
    thirds of them, and three."""
    colluders: Annotated[int, Ge(0)] = 0
    """Under `[privacy]`: so many clients of a round may tell the server their noise. The others' has to be enough, and
    is made so much larger."""
    masks: bool = True
    """Whether the numbers are masked. Without masks the same sum comes about, bit for bit, and sooner, but the server
    sees what each client adds: for simulations in which nobody is to be kept from seeing it."""

    def made(self, terms: "Terms | None" = None) -> "SecureSums | None":
        """`terms` are those of clients that are at sites."""
        if not self.sums:
            return None
        try:
            from protofed.engine.secure import SecureSums
        except ModuleNotFoundError as error:
            if error.name != "cryptography":
                raise
            raise BadInput("secure.sums needs the library cryptography: pip install 'protofed[privacy]'") from None
        return SecureSums(self, terms)
