"""Tensor, expert and sequence parallelism on torch.distributed, applied from outside to a plain model.

plan         who holds what: grids of ranks, tables of experts and slices; no tensors
collectives  what ranks exchange, counted; stand-ins and their cost
layers       the modules of one rank
apply        from a plain model, or a checkpoint, to one rank
step         where ranks meet in a decoding step of fixed addresses
drafter      from a plain drafter, or its file, to one rank
generation   generate on a world: seeds, verdicts on drafts, groups that finish at different times
launch       a process of a world: it joins, and ends with all others when one fails
synthetic    weights made on the device, for a rank whose checkpoint is not at hand
in_turn      all ranks of a world in one process, one after the other; a slice of a model checked so
run          `inkling-ref run`
calibrate    `inkling-ref bench collectives`: what they take here, beside the cost model
estimate     bytes, FLOPs, collectives and memory of a rank, on paper
arms         other ways to run a rank's weights: the reference, and it compiled
full_scale   one true rank of a full-size model on one GPU: its steps and prefill, and where their time goes
figures      what one rank of a full-size model measured, drawn beside its limits; a server, modelled
"""
