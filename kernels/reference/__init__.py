"""The numerics of fp8stack in plain torch: each file is the twin of the Triton kernel file of the same name.

These functions *define* the results. They run on any device, and the Triton kernels must agree with them bit for bit.
"""
