"""Description in words of how finely a model can be cut."""

from engine.model.sharding.split import BlockDims, split_parts


def test_the_coarsest_block_counts_and_absent_parts_are_not_named() -> None:
    blocks = [
        BlockDims(8, 2, n_ff=4096),
        BlockDims(n_state_head=6, n_state_group=2, n_ff_exp=768, n_ff_shexp=100),
        BlockDims(16, 4, n_ff=100),
        BlockDims(n_state_head=80, n_state_group=80, state_unit=32),
    ]
    found = {(p.name, p.unit): (p.n_layer, p.n_pieces) for p in split_parts(blocks, 1000)}
    assert found == {
        ("attention", "a head"): (2, 8),
        ("recurrent layer", "a head"): (1, 6),
        ("recurrent layer", "32 channels"): (1, 3),
        ("FFN", "32 columns"): (2, 4),
        ("experts", "32 columns of every expert"): (1, 24),
        ("shared expert", "32 columns"): (1, 4),
        ("vocabulary", "a row"): (0, 1000),
    }
