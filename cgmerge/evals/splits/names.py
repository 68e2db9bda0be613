"""Names of the split rules, apart so that the command line can show them without loading them."""

from typing import Literal

By = Literal["iid", "length", "template", "primitive", "mcd"]
