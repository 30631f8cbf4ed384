"""What a site raises that does not do what it is asked for."""

from protofed.federation.messages import Refusal


class Refused(Exception):
    """This site does not do what an order asks for."""

    def __init__(self, name: Refusal, text: str) -> None:
        super().__init__(f"{name}: {text}")
        self.name, self.text = name, text
