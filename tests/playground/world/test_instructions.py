"""Instructions: a parser that knows only the words recovers the edits, so every text has one meaning."""

import re

from hypothesis import given
from hypothesis import strategies as st

from retouch.core.random import generator
from retouch_worlds.playground.scenes import THINGS, Edit, Scene, Thing, random_scene
from retouch_worlds.playground.texts import KEEPS, PHRASES, corpus, instruction, phrase, untouched, vocabulary
from scene_reader import all_single_edits, meaning, random_edits, read


def test_no_two_single_edits_share_a_text() -> None:
    texts = [phrase(edit, pattern) for edit in all_single_edits() for pattern in PHRASES[edit.kind]]
    assert len(all_single_edits()) == 18 * (5 + 2 + 1 + 9 + 9)
    assert len(set(texts)) == len(texts)


@given(st.integers(0, 10**6), st.integers(1, 4), st.booleans())
def test_an_instruction_is_parsed_back_to_its_edits(seed: int, complexity: int, filler: bool) -> None:
    random = generator("read", seed)
    scene = random_scene(random, least=4)
    edits = random_edits(scene, complexity, random)
    text = instruction(edits, untouched(scene, edits), random, filler=filler)
    assert read(text) == {meaning(edit) for edit in edits}


def test_filler_puts_the_edit_at_other_positions() -> None:
    scene = Scene(0, (THINGS[0], THINGS[5], *[None] * 7))
    edit = Edit("remove", 0, THINGS[0], 0, None)
    texts = [instruction([edit], untouched(scene, [edit]), generator(i), filler=True) for i in range(200)]
    plain = {instruction([edit], untouched(scene, [edit]), generator(i), filler=False) for i in range(200)}
    assert plain == {phrase(edit, pattern) for pattern in PHRASES["remove"]}
    assert not plain & set(texts)
    starts = {len(text[: re.search("red circle", text).start()].split()) for text in texts}  # type: ignore[union-attr]
    lengths = {len(text.split()) for text in texts}
    assert min(starts) <= 3
    assert max(starts) >= 12
    assert max(lengths) >= 20
    assert scene.objects[edit.cell] == edit.thing


def test_filler_mentions_up_to_two_unchanged_things() -> None:
    scene = Scene(0, (*THINGS[:4], *[None] * 5))
    edit = Edit("recolour", 2, THINGS[2], 2, Thing("cyan", THINGS[2].shape))
    assert untouched(scene, [edit]) == [THINGS[0], THINGS[1], THINGS[3]]
    texts = [instruction([edit], untouched(scene, [edit]), generator(i), filler=True) for i in range(200)]
    kept = [{thing for thing in THINGS if any(keep.format(thing=" ".join(thing)) in text for keep in KEEPS)} for text in texts]
    assert set().union(*kept) == set(untouched(scene, [edit]))
    assert {len(things) for things in kept} == {0, 1, 2}
    # Before the edit and after it.
    named = [text.index(" ".join(THINGS[0])) < text.index(" ".join(THINGS[2])) for text in texts if " ".join(THINGS[0]) in text]
    assert {True, False} == set(named)


def test_the_vocabulary_is_small_and_equals_the_words_of_the_corpus() -> None:
    words = {word for text in corpus(generator("corpus"), 4000) for word in text.replace(",", " , ").replace(";", " ; ").split()}
    assert words == set(vocabulary())
    assert len(words) < 200
    assert all(word == word.lower() for word in words)
