"""Plans at the speed of a drag: bytes and work per rank, looked up instead of declared anew.

Imports no torch and nothing that holds weights.
"""
