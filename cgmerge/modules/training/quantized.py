"""bitsandbytes: needed for 4-bit bases only, but imported by peft wherever it is installed."""

import importlib
import sys

from cgmerge.errors import MissingExtra


def settle_bitsandbytes(*, needed: bool) -> None:
    """Find out whether bitsandbytes works, before peft imports it.

    A broken installation (no driver, wrong CUDA version) would otherwise break every training
    run. Where it is not needed it is hidden from this process, so that peft does without.

    Raises:
        MissingExtra: It is needed; the message holds the real reason.
    """
    try:
        importlib.import_module("bitsandbytes")
    except Exception as error:
        if needed:
            reason = " ".join(str(error).split())
            raise MissingExtra(
                f"4-bit training needs bitsandbytes, which cannot be imported: {reason}",
                code="bitsandbytes",
                hint="pip install bitsandbytes, or train without --load-in-4bit",
            ) from error
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]  # reads as: not installed
