"""Values that a controller creates by the thousand in a tenth of a second."""

from __future__ import annotations

from msgspec import Struct


class Value(Struct, frozen=True, array_like=True, gc=False, forbid_unknown_fields=True):
    """A few numbers that belong together; kept as a list of them.

    Creating and reading one takes a third of a named tuple's time. The garbage collector can skip it: values hold
    numbers and other values, never themselves.
    """
