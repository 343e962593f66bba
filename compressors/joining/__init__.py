"""How one call compresses several neighbouring tensors: one file for each way.

Neighbours that share a way make a *run* (`runs`). A way is a function of the step's draft and a run; it
returns the payloads of the run, end to end, and writes the unsent rest to the draft. But for `merged`, a run
decodes to the same bits as its tensors would by themselves.

    alone:       a call for each tensor.
    elements:    the compressor treats each element alike (`bf16`), and takes the run for one tensor.
    neighbours:  the compressor works on each tensor separately, in one kernel call for all.
    blocks:      levels are known before the gradient (`4bit`, `2bit`), and the call goes block by block.
    projected:   coordinates in bases (`lowrank`): a payload for each tensor, and one call for all of a unit.
    merged:      the sparsifier chooses from all tensors of a unit as from one, in a merged plan.
"""
