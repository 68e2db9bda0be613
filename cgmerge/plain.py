"""Numbers that people type: ASCII digits, as every other program reads them.

Python's own `int` and `float` also take `1_0`, digits of other scripts, and spaces around.
"""

import re

_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_NOT_FINITE = re.compile(r"[+-]?(?:inf|infinity|nan)", re.IGNORECASE)


def number(text: str) -> float:
    """Read a number; `inf` and `nan` are read too, so that whoever asks can say what is allowed.

    Raises:
        ValueError: Anything else.

    Example:
        >>> number("1e-3")
        0.001
    """
    if not (_NUMBER.fullmatch(text) or _NOT_FINITE.fullmatch(text)):
        raise ValueError(f"not a plain number: {text!r}")
    return float(text)


def whole(text: str) -> int:
    """Read a whole number.

    Raises:
        ValueError: Anything else, or thousands of digits.
    """
    if not _WHOLE.fullmatch(text):
        raise ValueError(f"not a plain whole number: {text!r}")
    return int(text)


def exact(value: float) -> str:
    """Write a number so that two that differ look different; whole ones without a point.

    Example:
        >>> exact(1e6), exact(0.95), exact(1e-12)
        ('1000000', '0.95', '1e-12')
    """
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return str(int(value))
    return repr(value)
