"""Text to token files, token files to rows; numpy and pyarrow only."""
