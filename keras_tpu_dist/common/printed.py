"""What a result shows at a prompt."""


class Printed:
    """Shows at a prompt what `print` does; a dataclass with it says `repr=False`."""

    def __repr__(self) -> str:
        return str(self)
