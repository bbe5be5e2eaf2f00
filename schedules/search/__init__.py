"""Orders that are found by search instead of by a formula."""
