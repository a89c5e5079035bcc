"""Callbacks that run a Monitor inside a trainer: of lightning, and of transformers.

_callback       what both callbacks share
_forwards       opening contexts at the model's forwards, in transformers' Trainer
_trainer        finding the Trainer, and saving the callback's state as JSON
_trl            rules for autograd Functions of TRL's trainers
"""
