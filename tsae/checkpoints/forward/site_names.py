"""What other tools call a site of the residual stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tsae.checkpoints.forward.hooks import Site, decoder_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def site_names(site: str, model: PreTrainedModel | None = None) -> dict[str, str]:
    """The names of a site, by tool.

    - transformer_lens: as here, such as blocks.14.hook_resid_post; sae_lens uses it too;
    - circuit_tracer: the hook within a block, hook_resid_post, for ``feature_input_hook``; the block is its layer;
    - nnsight: the expression within a trace, ``model.model.layers[14].output``, where blocks return a tensor;
    - delphi: the hook point below the base model whose output it is, layers.14; sparsify uses it too;
    - llama.cpp: the tensor of a control vector, direction.14.

    A tool that has no name for the site is left out: delphi and llama.cpp do not know what enters the first block, and
    llama.cpp cannot steer what leaves it.

    Args:
        site: TransformerLens name.
        model: whose blocks stand elsewhere than in ``model.layers``.

    Raises:
        TsaeError: for any other name.
    """
    place = Site.parse(site)
    blocks = "model.layers"
    if model is not None:
        found = decoder_blocks(model)
        blocks = next(name for name, module in model.named_modules() if module is found)
    below = blocks
    if model is not None:
        below = blocks.removeprefix(f"{model.base_model_prefix}.")
    elif "." in blocks:
        below = blocks.split(".", 1)[1]
    output_of = place.layer if place.point == "post" else place.layer - 1
    end = "output" if place.point == "post" else "input"
    names = {
        "transformer_lens": site,
        "circuit_tracer": site.split(".", 2)[2],
        "nnsight": f"model.{blocks}[{place.layer}].{end}",
    }
    if output_of >= 0:
        names["delphi"] = f"{below}.{output_of}"
    if output_of >= 1:
        names["llama.cpp"] = f"direction.{output_of}"
    return names
