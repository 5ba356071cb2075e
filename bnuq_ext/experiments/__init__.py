"""The runs of `bnuq demo` and `bnuq bbb`, and what the protocols share with them."""
