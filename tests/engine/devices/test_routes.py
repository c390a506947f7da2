"""Ways between devices: what is known, and what is assumed of the others."""

from engine.devices.routes import BY_HOST, ON_ONE_DEVICE, Way, Ways


def test_what_nobody_has_proven_goes_by_the_host() -> None:
    peer = Way("peer", "peer")
    ways = Ways({("cuda:0", "cuda:1"): peer})
    assert ways.between("cuda:0", "cuda:1") == peer
    assert ways.between("cuda:1", "cuda:0") == BY_HOST
    assert ways.between("cuda:1", "cuda:1") == ON_ONE_DEVICE


def test_kernels_need_a_way_between_all() -> None:
    ways = Ways({("cuda:0", "cuda:2"): Way(None, "host")})
    assert ways.have_stores(["cuda:0", "cuda:1"])
    assert not ways.have_stores(["cuda:0", "cuda:1", "cuda:2"])
