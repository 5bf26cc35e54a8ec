"""Values that a controller makes by the thousand in a tenth of a second."""

from __future__ import annotations

from msgspec import Struct


class Value(Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A few numbers that belong together; kept as a list of them.

    Made and read in a third of a named tuple's time, and of no concern to the garbage collector: values hold numbers
    and other values, and so never themselves.
    """
