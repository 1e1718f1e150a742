"""Batches and evaluation windows over a prepared text."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attractor.data import Batches, prepare, windows

sizes = st.tuples(st.integers(2, 60), st.integers(1, 59)).filter(lambda pair: pair[1] < pair[0])


@given(sizes=sizes, seed=st.integers(0, 2**64 - 1), step=st.integers(0, 2**40), share=st.integers(1, 3))
def test_a_batch_is_windows_of_the_text_and_the_union_of_its_ranks(sizes, seed, step, share):
    length, context = sizes
    tokens = np.arange(length, dtype=np.uint16) * 7  # every token names its place
    whole = Batches(tokens, 6 * share, context, seed)
    inputs, targets = whole.batch(step)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (6 * share, context)
    assert inputs.is_contiguous()
    assert (targets - inputs == 7).all()
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    for world_size in (2, 3, 6):
        ranks = [Batches(tokens, 6 * share, context, seed, rank, world_size) for rank in range(world_size)]
        assert torch.equal(torch.cat([part.batch(step)[0] for part in ranks]), inputs)
        assert torch.equal(torch.cat([part.batch(step)[1] for part in ranks]), targets)


@given(sizes=sizes, steps=st.integers(0, 5), after=st.integers(1, 3))
def test_resuming_goes_on_where_it_stopped(sizes, steps, after):
    tokens = np.arange(sizes[0], dtype=np.uint16)
    through = Batches(tokens, 4, sizes[1], seed=3)
    for _ in range(steps):
        next(through)
    state = json.loads(json.dumps(through.state_dict()))
    resumed = Batches(tokens, 4, sizes[1], seed=3, rank=1, world_size=2)  # also on another number of ranks
    resumed.load_state_dict(state)
    assert resumed.step == steps
    for _ in range(after):
        assert torch.equal(next(resumed)[0], next(through)[0][2:])


def test_every_start_is_reached_about_equally():
    batches = Batches(np.arange(13), 64, 3, seed=0)
    starts = torch.cat([next(batches)[0][:, 0] for _ in range(200)])
    counts = torch.bincount(starts)
    assert len(counts) == 10  # 0 to 9: the last window ends with the last token
    assert counts.min() > 0.85 * len(starts) / 10
    assert counts.max() < 1.15 * len(starts) / 10
    assert torch.equal(Batches(np.arange(4), 2, 3, seed=5).batch(0)[1], torch.tensor([[1, 2, 3], [1, 2, 3]]))


def test_steps_seeds_and_iteration():
    tokens = np.arange(1000)
    batches = Batches(tokens, 8, 4, seed=0)
    first, second = next(iter(batches))[0], next(batches)[0]
    assert not torch.equal(first, second)
    assert torch.equal(batches.batch(0)[0], first)
    assert not torch.equal(Batches(tokens, 8, 4, seed=1).batch(0)[0], first)


def test_the_stream_is_fixed_for_good():
    """Written down once: a resumed training must see the same data under any version of numpy."""
    starts = [
        Batches(np.arange(1_000_003), 4, 3, seed=7).batch(step)[0][:, 0].tolist() for step in (0, 1, 10**6)
    ]
    assert starts == [
        [238692, 347655, 612120, 709522],
        [212573, 629974, 362231, 978132],
        [254752, 256517, 324716, 739477],
    ]


def test_tokens_from_disk_are_copied(tmp_path):
    text = "Before we proceed any further, hear me speak.\n" * 20
    source = tmp_path / "input.txt"
    source.write_text(text)
    dataset = prepare(source, tmp_path / "out")
    inputs, targets = next(Batches(dataset.train, 1, 16, seed=0, device="cpu"))
    expected = dataset.tokenizer.decode(targets[0])
    inputs += 1  # neither the file nor the targets share memory with the inputs
    assert dataset.tokenizer.decode(targets[0]) == expected
    assert expected in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_batches_on_the_gpu():
    batches = Batches(np.arange(100), 4, 16, seed=0, device="cuda", pin_memory=True)
    inputs, targets = next(batches)
    assert inputs.is_cuda
    assert torch.equal(targets.cpu(), Batches(np.arange(100), 4, 16, seed=0).batch(0)[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a positive integer"),
        ({"context": 2.5}, "context=2.5 must be a positive integer"),
        ({"world_size": 0}, "world_size=0 must be"),
        ({"rank": 2, "world_size": 2}, "rank=2 must be 0 <= rank < world_size=2"),
        ({"rank": -1}, "rank=-1 must be"),
        ({"world_size": 3}, "batch_size=4 must be a multiple of world_size=3"),
        ({"seed": -1}, "seed=-1 must be an integer"),
        ({"seed": 2**64}, "0 <= seed < 2"),
        ({"context": 10}, "10 tokens are too few: context=10 needs one more"),
    ],
)
def test_batches_refuse(changes, message):
    with pytest.raises(ValueError, match=message):
        Batches(**{"tokens": np.arange(10), "batch_size": 4, "context": 3, "seed": 0, **changes})


def test_a_state_of_other_settings_is_refused():
    batches = Batches(np.arange(10), 4, 3, seed=0)
    good = batches.state_dict()
    for name in ("seed", "batch_size", "context", "num_tokens"):
        with pytest.raises(ValueError, match=f"the saved batches had {name}=77, these have"):
            batches.load_state_dict({**good, name: 77})
        with pytest.raises(ValueError, match=f"{name}=None"):
            batches.load_state_dict({key: value for key, value in good.items() if key != name})
    for step in (-1, None, "3"):
        with pytest.raises(ValueError, match=r"step=.* must be an integer"):
            batches.load_state_dict({**good, "step": step})


@given(
    tokens=st.lists(st.integers(0, 300), min_size=2, max_size=70),
    context=st.integers(1, 80),
    batch_size=st.integers(1, 5),
)
def test_every_target_counts_once(tokens, context, batch_size):
    tokens = np.array(tokens, dtype=np.uint16)
    read, counted, total = [], [], 0
    for inputs, targets, count in windows(tokens, context, batch_size):
        assert inputs.shape == targets.shape
        assert inputs.shape[0] <= batch_size
        assert inputs.shape[1] <= context
        assert count > 0
        read += inputs.flatten().tolist()
        counted += targets.flatten().tolist()
        total += count
    assert read == tokens[:-1].tolist()
    assert counted == tokens[1:].tolist()
    assert total == len(tokens) - 1


def test_windows_do_not_overlap():
    sweep = list(windows(np.arange(12), 3, 2))
    assert [inputs.tolist() for inputs, _, _ in sweep] == [[[0, 1, 2], [3, 4, 5]], [[6, 7, 8]], [[9, 10]]]
    assert [targets.tolist() for _, targets, _ in sweep] == [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9]], [[10, 11]]]
    assert [count for _, _, count in sweep] == [6, 3, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((np.arange(1), 3, 2), "1 tokens hold no target"),
        ((np.arange(9), 0, 2), "context=0 must be a positive integer"),
        ((np.arange(9), 3, 0), "batch_size=0 must be"),
    ],
)
def test_windows_refuse(arguments, message):
    with pytest.raises(ValueError, match=message):
        next(windows(*arguments))
