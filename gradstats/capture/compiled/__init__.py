"""Compiled models.

_used        whether the compiler is in use, and the devices on which contexts run graphs
_graphs      what the compiler calls in place of a graph that it recorded inside a context
_followed    such a graph's operations, followed while its backend traces them
_skipped     functions that run as graphs only outside of contexts
"""
