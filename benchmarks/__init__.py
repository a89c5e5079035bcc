"""Benchmarks: one command for each question, ``python -m benchmarks.all`` for every one.

step_overhead      what norms cost beside a plain step, ours and other libraries'
op_overhead        what following one operation costs, whatever its size
scaling            time and memory over B, T and d
crossover          which form a layer's norms take over T, and whether it is the faster one
convolution_forms  the same for convolutions
pair_forms         the same for inner products of two batches
monitor_overhead   what a monitor adds to training
influence          a train × query matrix beside other implementations
gpu                tests and kernels' speed on a GPU
report             the README's tables and plots, from ``results/*.csv``
"""
