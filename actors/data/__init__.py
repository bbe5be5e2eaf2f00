"""Rows from the user's own data: tables, streams and loaders, read in processes beside the stages."""
