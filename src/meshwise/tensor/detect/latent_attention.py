"""Find multi-head latent attentions (DeepSeek-V2, arXiv 2405.04434, section 2.1), and give parts to their modules.

    | hidden ─┬─ q_proj, or q_a_proj ── norm ── q_b_proj ─────────── heads of q ─┐
    |         └─ kv_a_proj_with_mqa ─┬─ latent ── norm ── kv_b_proj ─ heads of k, v ─┼─ attention ── o_proj ── hidden
    |                                └─ key of the position ─────── for every head ─┘

The matrices that write heads are split by heads, `o_proj` reads them. What lies before is computed whole on every rank.
The key of the position goes to every rank's own heads, so its gradients are summed over the ranks (`summed_from`)."""

from collections.abc import Mapping

from torch import nn

from meshwise.plan import Plan, PlanError
from meshwise.tensor.core.part import Part
from meshwise.tensor.detect.known_names import HEADS, KEY_HEADS

_LATENT = "kv_a_proj_with_mqa"


def latent_attentions(module: nn.Module) -> Mapping[str, nn.Module]:
    """Return the multi-head latent attentions of a model, by name."""
    return {
        name: each
        for name, each in module.named_modules()
        if all(isinstance(each._modules.get(key), nn.Linear) for key in (_LATENT, "kv_b_proj", "o_proj"))
        and _heads(each)
    }


def latent_parts(attention: nn.Module, *, name: str, plan: Plan) -> Mapping[str, Part]:
    """Return the parts of an attention called `name` and of its modules.

    Raises PlanError if the plan has more ranks than the attention has heads, splits tokens, or is not `tp_mode=1d`."""
    heads = _heads(attention)
    if plan.tp_mode != "1d" or plan.sequence_parallel:
        raise PlanError(
            f"{name} ({type(attention).__name__}) makes queries, keys and values from latents, which '{plan}' has no "
            "part for. Nearest that works: 'tp_mode=1d sequence_parallel=0'"
        )
    if heads < plan.tp:
        raise PlanError(
            f"{name} has {heads} heads, and '{plan}' shares them out over {plan.tp} ranks. "
            f"Nearest that works: 'tp={heads}'"
        )
    parts = {}
    for key, child in attention.named_children():
        if key in ("q_proj", "q_b_proj", "kv_b_proj") and isinstance(child, nn.Linear):
            parts[f"{name}.{key}"] = Part("colwise", grain=child.out_features // heads)
        elif key == "o_proj" and isinstance(child, nn.Linear):
            parts[f"{name}.{key}"] = Part("rowwise", grain=child.in_features // heads)
        elif any(True for _ in child.parameters()):
            latent = vars(attention)["kv_lora_rank"] if key == _LATENT else None
            parts[f"{name}.{key}"] = Part("whole", summed_from=latent)
    counts = tuple((key, 1) for key in (*HEADS, *KEY_HEADS) if vars(attention).get(key) == heads)
    return {**parts, name: Part("attention", counts=counts, heads=heads)}


def _heads(attention: nn.Module) -> int:
    """Return the number of heads, or 0 if no attribute shows it or the matrices do not fit it."""
    own = vars(attention)
    heads = next((own[key] for key in HEADS if type(own.get(key)) is int), 0)
    if not heads or type(own.get("kv_lora_rank")) is not int:
        return 0
    sizes = [attention.get_submodule("kv_b_proj").out_features, attention.get_submodule("o_proj").in_features]
    return 0 if any(size % heads for size in sizes) else heads  # type: ignore[operator]
