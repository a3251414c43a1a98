#!/usr/bin/env python3
"""torch on the shapes of the gpu_gemm benchmark: bmm and _grouped_mm with weights in HBM, and
a three-slot ring fed by the copy engine with weights in pinned memory. Prints csv lines."""

import statistics
import sys

import torch

SHAPES = [(32, 4096, 2048), (16, 4096, 7168)]
ROWS = [int(m) for m in sys.argv[1].split(",")] if len(sys.argv) > 1 else [1, 16, 64, 256, 1024, 4096]


def median_ms(call, calls, rounds):
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times[1:])


class Ring:
    """Three slots of one expert; the copies run on a stream of their own."""

    def __init__(self, pinned):
        self.pinned = pinned
        self.slots = [torch.empty_like(pinned[0], device="cuda") for _ in range(3)]
        self.stream = torch.cuda.Stream()
        self.filled = [torch.cuda.Event() for _ in range(3)]
        self.freed = [torch.cuda.Event() for _ in range(3)]

    def call(self, a, out):
        main = torch.cuda.current_stream()
        self.stream.wait_stream(main)
        for g in range(len(self.pinned)):
            s = g % 3
            with torch.cuda.stream(self.stream):
                if g >= 3:
                    self.stream.wait_event(self.freed[s])
                self.slots[s].copy_(self.pinned[g], non_blocking=True)
                self.filled[s].record(self.stream)
            main.wait_event(self.filled[s])
            torch.matmul(a[g], self.slots[s].t(), out=out[g])
            self.freed[s].record(main)


def main():
    print("experts,n,k,m,what,ms")
    for experts, n, k in SHAPES:
        one = torch.randn(n, k, dtype=torch.bfloat16, device="cuda")
        weights = one.repeat(experts, 1, 1)
        pinned = weights.cpu().pin_memory()
        ring = Ring(pinned)
        for m in ROWS:
            a = torch.randn(1, m, k, dtype=torch.bfloat16, device="cuda").repeat(experts, 1, 1)
            out = torch.empty(experts, m, n, dtype=torch.bfloat16, device="cuda")
            offsets = torch.arange(1, experts + 1, device="cuda", dtype=torch.int32) * m
            flat, transposed = a.view(-1, k), weights.transpose(1, 2)
            cases = [
                ("bmm", lambda: torch.bmm(a, transposed, out=out), 10, 7),
                ("_grouped_mm", lambda: torch._grouped_mm(flat, transposed, offs=offsets), 10, 7),
                ("ring", lambda: ring.call(a, out), 1, 5),
            ]
            for name, call, calls, rounds in cases:
                ms = median_ms(call, calls, rounds)
                print(f"{experts},{n},{k},{m},{name},{ms:.4f}", flush=True)
            del a, out, flat


if __name__ == "__main__":
    main()
