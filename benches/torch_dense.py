#!/usr/bin/env python3
"""torch on the shapes of the general GEMM's timings (tests/tests/gpu_dense_gemm.rs)."""

import statistics

import torch


def median_us(call, calls=20, rounds=9):
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return 1e3 * statistics.median(times[1:])


for name, count, size in [("8192^3", 1, 8192), ("64 x 512^3", 64, 512)]:
    a, b = (torch.randn(count, size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    d = torch.empty_like(a)
    graph = torch.cuda.CUDAGraph()
    torch.bmm(a, b.transpose(1, 2), out=d)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        torch.bmm(a, b.transpose(1, 2), out=d)
    us = median_us(graph.replay)
    print(f"TORCH {name} {us:.1f} us {2 * count * size**3 / us / 1e6:.1f} TFLOP/s", flush=True)
