#!/usr/bin/env python3
"""torch (oneDNN) on the shapes of `cargo bench --bench cpu_gemm`.

For each expert one matmul, bf16 and int8 (`torch._int_mm`, quantised activations and weights, i32 out,
then scales), with weights rotated through far more memory than the caches hold. Verified first
(sampled elements against float64), then timed: median of single calls over all experts of a shape.

Prints and, with --csv FILE, writes the same columns as `asym-gemm bench cpu --csv`; ceilings,
which torch does not measure, are left empty.

    python3 cpu_gemm_torch.py [--quick] [--threads N] [--csv FILE]
"""

import argparse
import os
import statistics
import subprocess
import time

import torch

COLUMNS = (
    "commit,cpu,threads,isa,kernel,kind,format,experts,a,b,size,calls,"
    "median_ms,best_ms,weight_gb_s,tera_ops,dram_gb_s,product,product_tera_ops,"
    "share_of_dram,share_of_products,share"
)
# (experts, N, K): plain, then gate and up of two expert shapes.
SHAPES = [(32, 4096, 2048), (128, 2 * 768, 2048), (64, 2 * 1536, 4096)]
ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]
QUICK_ROWS = [1, 4, 16, 64, 256]
WEIGHT_BYTES = 1536 << 20


def cpu_name():
    try:
        with open("/proc/cpuinfo") as info:
            for line in info:
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip().replace(",", " ")
    except OSError:
        pass
    return "unknown"


def commit():
    if named := os.environ.get("ASYM_GEMM_COMMIT"):
        return named
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


class Bf16:
    """D = A . B^T in bf16."""

    name = "bf16"
    bytes = 2

    def __init__(self, count, n, k):
        self.weights = [torch.empty(n, k, dtype=torch.bfloat16).uniform_(-1, 1) for _ in range(count)]

    def activations(self, rows, k):
        return torch.empty(rows, k, dtype=torch.bfloat16).uniform_(-1, 1)

    def call(self, a, which):
        return torch.nn.functional.linear(a, self.weights[which])

    def expected(self, a, which, row, column):
        products = a[row].double() * self.weights[which][column].double()
        return products.sum().item(), products.abs().sum().item()


class Int8:
    """Quantised operands, one scale a row; D in bf16."""

    name = "int8"
    bytes = 1
    scale = 0.01

    def __init__(self, count, n, k):
        # [K, N] seen through a transposition, as torch._int_mm wants it.
        self.weights = [torch.randint(-127, 128, (n, k), dtype=torch.int8) for _ in range(count)]
        self.scales = torch.full((n,), self.scale)

    def activations(self, rows, k):
        return torch.randint(-127, 128, (rows, k), dtype=torch.int8)

    def call(self, a, which):
        sums = torch._int_mm(a, self.weights[which].t())
        return (sums.float() * (self.scale * self.scales)).bfloat16()

    def expected(self, a, which, row, column):
        products = a[row].double() * self.weights[which][column].double() * self.scale**2
        return products.sum().item(), products.abs().sum().item()


def verify(kind, a, which, found):
    rows, columns = found.shape
    for sample in range(16):
        row, column = (rows - 1, columns - 1) if sample == 0 else (sample * 7 % rows, sample * 131 % columns)
        expected, magnitude = kind.expected(a, which, row, column)
        error = abs(found[row, column].double().item() - expected)
        if not error <= abs(expected) / 128 + magnitude * 1e-5:
            raise SystemExit(f"{kind.name} [{row}, {column}] is off by {error}")


def measure(kind, a, experts, budget, fewest):
    verify(kind, a, 0, kind.call(a, 0))
    copies = len(kind.weights) // experts
    times = []
    start = time.perf_counter()
    while len(times) < fewest or (time.perf_counter() - start < budget and len(times) < 300):
        first = len(times) % copies * experts
        before = time.perf_counter()
        for expert in range(experts):
            kind.call(a, first + expert)
        times.append(time.perf_counter() - before)
    return times


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one shape, fewer rows")
    parser.add_argument("--threads", type=int, help="threads of torch")
    parser.add_argument("--csv", help="file for the records")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(1)
    shapes, rows = (SHAPES[:1], QUICK_ROWS) if arguments.quick else (SHAPES, ROWS)
    budget, fewest = (0.4, 3) if arguments.quick else (1.5, 5)
    head = [commit(), cpu_name(), str(torch.get_num_threads()), "torch " + torch.__version__]
    lines = [COLUMNS]
    for experts, n, k in shapes:
        for Kind in (Int8, Bf16):
            copy_bytes = experts * n * k * Kind.bytes
            kind = Kind(max(1, WEIGHT_BYTES // copy_bytes) * experts, n, k)
            for m in rows:
                a = kind.activations(m, k)
                try:
                    times = measure(kind, a, experts, budget, fewest)
                except (RuntimeError, AttributeError) as error:
                    reason = str(error).splitlines()[0]
                    print(f"skipped: {kind.name} {experts} x [{n}, {k}] m={m}: {reason}")
                    continue
                median, best = statistics.median(times), min(times)
                fields = head + [
                    "onednn", "gemm", kind.name, str(experts), str(n), str(k), str(m), str(len(times)),
                    f"{median * 1e3:.4f}", f"{best * 1e3:.4f}", f"{copy_bytes / median * 1e-9:.2f}",
                    f"{2e-12 * experts * m * n * k / median:.4f}", "", "", "", "", "", "",
                ]
                lines.append(",".join(fields))
                print(lines[-1], flush=True)
    if arguments.csv:
        with open(arguments.csv, "w") as file:
            file.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
