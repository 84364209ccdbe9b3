"""Read folders of Hugging Face with a tensor for each expert into models with one tensor for all experts.

    | mlp.experts.0.gate_proj.weight (inner, features)  ┐
    | mlp.experts.0.up_proj.weight   (inner, features)  ├─ mlp.experts.gate_up_proj (experts, 2 · inner, features)
    | mlp.experts.1.gate_proj.weight …                  ┘
    | mlp.experts.0.down_proj.weight (features, inner)  ── mlp.experts.down_proj    (experts, features, inner)

Each tensor of an expert is a rectangle of the fused tensor. So a rank reads only the experts that it holds.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

from meshwise.checkpoint.checkpoint_index import StoredRectangle, StoredTensor
from meshwise.layout.rectangles import Rectangle

_FUSED: Mapping[str, tuple[str, ...]] = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_OTHER_NAMES: Mapping[str, str] = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""Names of an expert's matrices in Mixtral's folders."""
_RENAMED = (".block_sparse_moe.", ".mlp.")
"""Part of the names in Mixtral's folders, and the name in its modules."""


def with_fused_experts(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a folder, by `slot/name`, with further entries: fused experts, and names of Mixtral."""
    found = {name.replace(*_RENAMED): tensor for name, tensor in tensors.items()} | dict(tensors)
    experts: dict[str, dict[tuple[int, str], StoredTensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name.replace(*_RENAMED))
        if match and len(tensor.shape) == 2:
            experts[match[1]][int(match[2]), _OTHER_NAMES.get(match[3], match[3])] = tensor
    for holder, parts in experts.items():
        count = 1 + max(number for number, _ in parts)
        for fused, matrices in _FUSED.items():
            pieces = [
                (number, row, parts.get((number, key))) for number in range(count) for row, key in enumerate(matrices)
            ]
            present = [piece for _, _, piece in pieces if piece is not None]
            if len(present) == len(pieces) and len({piece.shape for piece in present}) == 1:
                rows, columns = present[0].shape
                placed = tuple(
                    StoredRectangle(part.file, part.entry, Rectangle((number, row * rows, 0), (1, rows, columns)))
                    for number, row, piece in pieces
                    for part in (piece.parts if piece is not None else ())
                )
                found[f"{holder}.{fused}"] = StoredTensor(
                    present[0].dtype, (count, rows * len(matrices), columns), placed
                )
    return found
