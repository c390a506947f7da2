"""Attacks with generated input: hours on demand, and a part of them in each run of the tests."""
