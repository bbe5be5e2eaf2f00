"""Orders found by search instead of by a formula."""
