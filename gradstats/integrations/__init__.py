"""Callbacks that run a Monitor inside a trainer: of lightning, and of transformers.

_trainer        what that of transformers asks of its Trainer, and how it is saved
_trl            what TRL's trainers, which are transformers', need to be measured
"""
