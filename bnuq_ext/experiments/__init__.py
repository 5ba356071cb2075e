"""The protocols, one a file, and the store that makes their runs resumable."""
