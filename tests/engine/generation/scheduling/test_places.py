"""Recurrent states go where a pass is fastest, and none is lost on the way."""

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.generation.scheduling.places import CachePlace, Places
from tests.helpers.paged_toy import PagedToy


@settings(max_examples=60, deadline=None)
@given(n_slots=st.integers(1, 6), data=st.data())
def test_any_choice_of_sequences_is_put_in_order(n_slots: int, data: st.DataObject) -> None:
    runtime = PagedToy(n_slots=n_slots)
    places = Places(runtime, 0)
    n = data.draw(st.integers(1, n_slots))
    held = [places.open(()) for _ in range(n)]
    names: dict[int, int] = {}
    for name, place in enumerate(held):
        runtime.load_slot(place.slot, 100 + name)
        names[id(place)] = 100 + name
    for _ in range(4):
        chosen: list[CachePlace] = data.draw(
            st.lists(st.sampled_from(held), unique_by=id, min_size=1)
        )
        found = places.arrange(chosen)
        assert [place.slot for place in found] == list(range(len(chosen)))
        assert {id(place) for place in found} == {id(place) for place in chosen}
        for place in held:
            assert runtime.save_slot(place.slot)[0] == names[id(place)]
    for place in held:
        places.close(place, is_kept=False)
    assert [places.open(()).slot for _ in range(n_slots)] == list(range(n_slots))
