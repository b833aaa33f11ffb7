"""Compile the kernels of device tables for an H200, which needs no GPU; count some instructions of the machine code."""

from __future__ import annotations

import json
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from echelon.parameter_server.device_table import triton_kernels as kernels
from echelon.parameter_server.device_table.device_index import FREE_KEY

H200 = GPUTarget("cuda", 90, 32)
INDEX = {"count": "i32", "size": "i32", "low": "i32", "span": "i64", "scale": "i64"}
FLOATS = ("grads_at", "sums_at", "rows_at")


def compiled(kernel: Any, constants: dict[str, Any], **types: str) -> str:
    """Return the PTX of a kernel; pointers are to int64 but for those of floats."""
    arguments = [name for name in kernel.arg_names if name not in constants]
    plain = {name: "*fp32" if name in FLOATS else "*i64" for name in arguments if name.endswith("_at")}
    signature = {name: "constexpr" if name in constants else {**plain, **types}[name] for name in kernel.arg_names}
    source = ASTSource(kernel, signature, constants)
    return str(triton.compile(source, target=H200, options={"enable_fp_fusion": False}).asm["ptx"])


def update(rule: Any, dim: int, row: int) -> str:
    columns = max(4, triton.next_power_of_2(dim))
    constants = {"RULE": rule, "DIM": dim, "ROW": row, "KIND": 0, "COLUMNS": columns, "PIECE": 256}
    numbers = dict.fromkeys(("scale", "rate", "setting1", "setting2", "setting3"), "fp32")
    integers = {"count": "i32", "seed": "i64", "filled": "i32", "seen": "i32"}
    pointers = {"new_at": "*i1", "meta_at": "*i32", "first_at": "*fp64"}
    return compiled(kernels.update, {**constants, "BLOCK": 2048 // columns}, **numbers, **integers, **pointers)


def main() -> None:
    programs = {
        "find": compiled(kernels.find, {"FREE_KEY": FREE_KEY, "PLACES": False, "BLOCK": 128}, **INDEX),
        "claim": compiled(kernels.claim, {"FREE_KEY": FREE_KEY, "BLOCK": 128}, **INDEX),
        "gather": compiled(
            kernels.gather, {"DIM": 16, "ROW": 17, "KIND": 0, "COLUMNS": 16, "BLOCK": 128},
            first_at="*fp64", out_at="*fp32", count="i32", seed="i64", filled="i32", width="i32",
        ),
        "piece_sums": compiled(kernels.piece_sums, {"DIM": 16, "COLUMNS": 16, "PIECE": 256}),
        "row_adagrad": update(kernels.ROW_ADAGRAD, 16, 17),
        "adam": update(kernels.ADAM, 128, 384),
    }  # fmt: skip
    words = ("fma.rn.f32", "sqrt.rn.f32", "atom.global")
    print(json.dumps({name: {word: ptx.count(word) for word in words} for name, ptx in programs.items()}))


if __name__ == "__main__":
    main()
