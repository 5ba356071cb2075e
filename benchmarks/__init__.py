"""Speed against what a user could do without this package. Run `make bench`."""
