"""Both forms for Hopper GPUs (sm_90) in Gluon, Triton's lower-level language: bfloat16 and float16.

The same computation as `sympow.kernels.attention`, whose plain PyTorch reference is also that of these kernels.
`forward` and `backward` are the attention form, warp-specialized, for heads of 64 to 128; `short_forward` and
`short_backward` are faster for short sequences of heads of 64; and `states` has what the chunked form needs besides,
for heads of 128. `attention.engines` decides which of them a call runs on.
"""
