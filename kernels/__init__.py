"""Triton kernels for per-example gradient norms and inner products.

One file per family, each a vertical story: device code, then the launcher that checks its input,
chooses a tile and reduces the partial results. Importing this package imports neither torch nor
triton, so that the library works on machines without them.

Symbols: B examples, T positions, `a` layer inputs (B, T, d_in), `g` gradients of the loss with
respect to the layer's outputs (B, T, d_out). The per-example weight gradient is
G_i = sum_t g_it a_it^T, of shape (d_out, d_in), like the weight itself.
"""
