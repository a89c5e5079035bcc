"""Benchmarks: one command for each question, ``python -m benchmarks.all`` for every one.

step_overhead      what norms cost beside a plain step, ours and other libraries'
op_overhead        what following one operation costs, whatever its size
scaling            time and memory over B, T and d
crossover          which form a layer's norms take over T, and whether it is the faster one
convolution_forms  the same for convolutions
pair_forms         the same for inner products of two batches
monitor_overhead   what a monitor adds to training
packed             what norms of packed examples cost, beside a plain step and beside padding
influence          a train × query matrix beside other implementations
wrong_labels       which scores find flipped labels
gpu                tests and kernels' speed on a GPU, of these:
  bench_linear_kernels, bench_layer_kernels    kernels against their floors and rivals
  kernel_times     where the device's time goes in a step
matrix_products    which of PyTorch's libraries multiplies matrices faster on a CPU
tune_linear_kernels    the tiles that kernels are shipped with
report             the documentation's tables, and with plots its pictures, from ``results/*.csv``

What they share: workloads (models and batches), providers (ways to per-example norms), checking
(which of these are right), harness (timing and results), kernel_harness (the same for kernels),
layer_kernels (kernels of layers, and their rivals), ledger (memory), limited (commands that end in
time), tables (the report's, in Markdown).
"""
