"""raypipe trains models too large for one GPU as pipelines of Ray actors, on any network of machines."""

__version__ = "0.1.0"
