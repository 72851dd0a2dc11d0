"""Inline PTX of the Hopper kernels on a CPU, which no interpreter runs."""

import re

import torch


def emulate(ptx, blocks, warps, given, boxes):
    """What the inline PTX of the Hopper kernels does with registers [blocks, warps, 32]: all of them afterwards.

    Every line is done by all threads before the next, so that none waits; how many bytes `st.async` sent comes second.
    boxes: [blocks, floats] shared memory, at address 0 in each block; written.
    """
    lane = torch.arange(32)
    shape = blocks, warps, 32
    here, active, sent = torch.arange(blocks)[:, None, None].expand(shape), torch.ones(shape, dtype=torch.bool), 0
    registers = {
        "%laneid": lane.expand(shape),
        "%tid.x": (32 * torch.arange(warps)[:, None] + lane).expand(shape),
        "%cluster_ctarank": here,
        "box": torch.zeros(shape, dtype=torch.long),
        "0f00000000": torch.zeros(shape, dtype=torch.float64),
    } | given
    away = 1 << 32  # an address in another block holds its rank above this bit

    def read(name):
        return registers[name] if name in registers else torch.full(shape, int(name))

    def place(operand):
        base, _, offset = operand.partition(" + ")
        return read(base) + int(offset or 0)

    compute = {
        "mov": lambda a: a,
        "shr": lambda a, b: a >> b,
        "shl": lambda a, b: a << b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "div": lambda a, b: a // b,
        "add": lambda a, b: a + b,
        "mad": lambda a, b, c: a * b + c,
        "setp.lt": lambda a, b, both=True: (a < b) & both,
        "setp.ge": lambda a, b, both=True: (a >= b) & both,
        "setp.eq": lambda a, b: a == b,
        "setp.ne": lambda a, b: a != b,
        "selp": lambda a, b, p: torch.where(p, a, b),
        "shfl": lambda a, other, *_: a.gather(-1, other),
        "mapa": lambda a, rank: a + away * (rank + 1),
    }
    for line in ptx.splitlines():
        if line.endswith(":"):  # all come together
            active[:] = True
            continue
        guard, code = re.fullmatch(r"(@!?p )?(.*?);?", line).groups()
        op, _, operands = code.partition(" ")
        if op[0] in ".{}" or op.startswith(("bar", "mbarrier")) or operands == "waiting":
            continue
        if op == "bra":
            active &= ~registers["p"]
            continue
        out, *operands = re.sub(r"[][{}]", "", operands).split(", ")
        kind = ".".join(op.split(".")[: 2 if op.startswith("setp") else 1])
        if kind == "st":
            at, by = place(out), active & registers["p"] if guard else active
            if op.startswith("st.async"):
                assert torch.equal(at // away, read(operands.pop()) // away)  # the barrier beside the box
                sent += 4 * len(operands) * int(by.sum())
            for k, name in enumerate(operands):
                boxes[torch.where(at >= away, at // away - 1, here)[by], at[by] % away // 4 + k] = read(name)[by]
            continue
        if kind == "ld":
            word = place(operands.pop()) // 4
            outs, results = [out, *operands], []
            for k in range(len(outs)):
                at = (word + k).clamp(max=boxes.shape[1] - 1)
                results.append(boxes.gather(1, at.flatten(1)).view(shape))
        else:
            given = [read(name) for name in operands]
            if op.startswith("shfl.sync.bfly"):
                given[1] = lane ^ given[1]
            outs, results = [out], [compute[kind](*given)]
        for name, result in zip(outs, results, strict=True):
            registers[name] = torch.where(registers["p"], result, registers[name]) if guard else result
    return registers, sent


def floats(blocks, count):
    """Shared memory, in which nothing is written yet."""
    return torch.full((blocks, count), torch.nan, dtype=torch.float64)
