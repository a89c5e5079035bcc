"""Callbacks that run a Monitor inside a trainer: of lightning, and of transformers.

_trainer        what the callback of transformers needs from its Trainer, and how it is saved
_trl            what TRL's trainers need to be measured
"""
