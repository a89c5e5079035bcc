"""Callbacks that run a Monitor inside a trainer: of lightning, and of transformers.

_callback       what the callbacks have in common
_forwards       the model's forwards in the steps of a Trainer of transformers
_trainer        what else its callback needs from the Trainer, and how it is saved
_trl            what TRL's trainers need to be measured
"""
