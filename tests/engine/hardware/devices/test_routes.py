"""Routes between devices: what is known, and what is assumed of the others."""

from engine.hardware.devices.topology import BY_HOST, ON_ONE_DEVICE, Routes, Way


def test_what_nobody_has_proven_goes_by_the_host() -> None:
    peer = Way("peer", "peer")
    routes = Routes({("cuda:0", "cuda:1"): peer})
    assert routes.between("cuda:0", "cuda:1") == peer
    assert routes.between("cuda:1", "cuda:0") == BY_HOST
    assert routes.between("cuda:1", "cuda:1") == ON_ONE_DEVICE


def test_kernels_need_a_way_between_all() -> None:
    routes = Routes({("cuda:0", "cuda:2"): Way(None, "host")})
    assert routes.have_stores(["cuda:0", "cuda:1"])
    assert not routes.have_stores(["cuda:0", "cuda:1", "cuda:2"])
