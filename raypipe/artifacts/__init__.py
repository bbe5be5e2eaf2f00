"""What commands exchange, each with one file format."""
