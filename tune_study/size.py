"""How many parameters a model has, and the width at which a deeper one has as many."""

from __future__ import annotations

from tune_study.config import ConfigError


def parameter_count(depth: int, width: int, vocab_size: int, context: int) -> int:
    """Parameters of the baseline: embeddings, 12 C^2 + 2 C a block, and the final gain."""
    return (vocab_size + context + 1) * width + depth * (12 * width**2 + 2 * width)


def width_for(
    depth: int, parameters: int, vocab_size: int, context: int, head_width: int
) -> dict[str, int]:
    """The `width` and `heads` of the model of that depth that is nearest to a number of parameters.

    The width is a whole number of heads; their width does not change, so that depth and width are
    all that does.

    Raises:
        ConfigError: if even one head has more parameters than asked for, by half.
    """

    def miss(heads: int) -> int:
        return abs(parameter_count(depth, heads * head_width, vocab_size, context) - parameters)

    heads = 1
    while miss(heads + 1) < miss(heads):
        heads += 1
    if miss(heads) > parameters / 2:
        raise ConfigError(
            f"parameters = {parameters}: too few for depth {depth} with heads {head_width} wide. "
            "Give more, or narrower heads."
        )
    return {"width": heads * head_width, "heads": heads}


def flops_per_token(matrices: int, depth: int, width: int, context: int) -> float:
    """Floating-point operations of one token's forward and backward pass.

    6 for each parameter of a matrix it is multiplied by, and 12 x depth x width x context for
    attention (Chowdhery et al. 2022, 2204.02311, appendix B).
    """
    return 6 * matrices + 12 * depth * width * context
