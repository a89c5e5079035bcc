"""Compiled models.

_used        whether compiled models are in use, and where contexts run their graphs
_graphs      what the compiler calls in place of a graph that it recorded inside a context
_followed    the operations of such a graph, followed while its backend traces it
_skipped     functions that run as graphs only outside of contexts
"""
