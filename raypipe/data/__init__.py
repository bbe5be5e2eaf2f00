"""Text to token files (`prepare`) and token files to rows (`tokens`); numpy and pyarrow only, no torch."""
