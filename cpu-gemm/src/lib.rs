//! Expert GEMM and MoE feed-forward on the CPU: AVX-512 and portable kernels.
