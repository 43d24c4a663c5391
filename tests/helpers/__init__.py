"""Shared pieces of the tests: processes with a bound, tiny model folders, error figures."""
