"""The proof that T replicas may go through a model as one batch: found out by trial, and remembered."""
