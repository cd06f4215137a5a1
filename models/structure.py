"""What the structure of a Hopper config comes to: its query tokens, products and registers, for arrays of configs.

The same as kernels/paged_mqa_logits/sm90/resources.py says one config at a time; of another kernel, what comes nearest.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from tilewise.kernels.paged_mqa_logits.sm90.pieces import first_token, product_count
from tilewise.kernels.paged_mqa_logits.sm90.resources import CONSUMER_REGISTERS, REGISTERS_PER_SM
from tilewise.kernels.paged_mqa_logits.spec import MAX_NEXT_N, Config

# What follows from the config alone.
DERIVED = ("hopper", "most_tokens", "products", "all_products", "registers", "token_imbalance")
# Registers of a consumer's thread beside accumulators and weights, as sm90/resources.py has them.
PLAIN_REGISTERS, REGISTERS_PER_PRODUCT = 26.0, 6.0


def derived(config: Config) -> tuple[float, ...]:
    """The numbers of DERIVED: whether it is of the Hopper kernel; query tokens and products of the consumer that has
    most; products of all consumers of a set; registers of a consumer's thread; those tokens over an even share."""
    # A config from a damaged file may say anything; what no launch has is taken for the most that one has.
    fuse_n, dot_n = min(max(config.fuse_n, 1), MAX_NEXT_N), min(max(config.dot_n, 1), MAX_NEXT_N)
    if config.kernel != "sm90":
        count = float(-(-fuse_n // dot_n))
        return 0.0, float(fuse_n), count, count, 1.0, 1.0
    split, consumers, per_sm = (
        min(max(value, 1), MAX_NEXT_N) for value in (config.token_split, config.consumers, config.ctas_per_sm)
    )
    starts = [first_token(fuse_n, dot_n, split, part) for part in range(split + 1)]
    tokens = [end - start for start, end in itertools.pairwise(starts)]
    products = [product_count(own, dot_n) for own in tokens]
    registers = REGISTERS_PER_SM // (128 * (consumers + 1) * per_sm) // 8 * 8
    if per_sm == 1:
        registers = CONSUMER_REGISTERS.get(consumers, registers)
    most = float(max(tokens))
    return 1.0, most, float(max(products)), float(sum(products)), max(registers, 1.0), most * split / fuse_n


def register_columns(heads: Any, config: Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    """Products of a tile in flight (0 of another kernel); whether the weights stay in registers, and whether the relu
    of even columns is a maximum (-1 of another kernel); share of the registers that nothing needs."""
    hopper, products, limit = config["hopper"], config["products"], config["registers"]
    each = config["dot_n"] * (heads / 2.0)
    needed = each + config["most_tokens"] * heads / 4.0 + REGISTERS_PER_PRODUCT * products + PLAIN_REGISTERS
    two = (products > 1.0) & (needed + each <= limit)
    needed = needed + two * each
    keeps = needed <= limit
    other = hopper - 1.0
    return (
        (two + 1.0) * hopper,
        keeps * hopper + other,
        (keeps & (products == 1.0)) * hopper + other,
        (limit - needed) / limit * hopper,
    )
