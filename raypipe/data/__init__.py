"""Text and images to files, files to rows; numpy and pyarrow only, but for what the bundled sources need."""
