"""The representation of results at a prompt."""


class Printed:
    """Shows the text of `print` at a prompt; dataclasses with it need `repr=False`."""

    def __repr__(self) -> str:
        return str(self)
