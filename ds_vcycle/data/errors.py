"""The one error of this package."""

from __future__ import annotations

from ds_vcycle.config import UserError


class DataError(UserError):
    """A source, a tokenizer or a prepared corpus cannot be used; says which, why and what to do."""
