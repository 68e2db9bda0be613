"""Routing: experts whose weights depend on the input, token by token or sequence by sequence."""
