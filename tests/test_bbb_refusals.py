"""What runs of Bayes by Backprop refuse: settings, priors, checkpoints."""

from dataclasses import replace

import pytest
from test_bbb import TINY

from bnuq_ext.experiments import bbb


def test_all_checkpoints_are_checked_before_a_run_is_trained(tmp_path):
    bbb.run(tmp_path, ["mixture"], TINY, progress=False)
    fewer = replace(TINY, epochs=1)
    with pytest.raises(ValueError, match="epochs must be at least the .*mixture holds, got 1"):
        bbb.run(tmp_path, ["gaussian", "mixture"], fewer, progress=False)
    (tmp_path / "mixture" / "checkpoint.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="mixture.* must be a checkpoint of this network"):
        bbb.run(tmp_path, ["gaussian", "mixture"], TINY, progress=False)
    assert not (tmp_path / "gaussian").exists()


def test_a_run_without_an_epoch_stands_in_no_other_s_way(tmp_path):
    with pytest.raises(ValueError, match="got nan in epoch 1$"):
        bbb.run(tmp_path, ["gaussian"], replace(TINY, learning_rate=1e30), progress=False)
    bbb.run(tmp_path, ["gaussian"], replace(TINY, epochs=1), progress=False)
    with pytest.raises(ValueError, match="got one with learning_rate [^;]*$"):
        bbb.run(tmp_path, ["gaussian"], replace(TINY, learning_rate=1e30), progress=False)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden": 0}, "bbb: hidden must lie in [1, 2^24), got 0"),
        ({"epochs": -1}, "bbb: epochs must lie in [1, 2^24), got -1"),
        ({"scheme": "linear"}, "bbb: scheme must be one of uniform, geometric, got 'linear'"),
        ({"scaling": "1"}, "bbb: scaling must be one of 255, standard, 126, got '1'"),
        ({"seed": -1}, "bbb: seed must lie in [0, 2^20), got -1"),
    ],
)
def test_rejects_settings(change, message):
    with pytest.raises(ValueError) as caught:
        bbb.Settings(**change)
    assert str(caught.value) == message


def test_rejects(tmp_path):
    with pytest.raises(ValueError) as caught:
        bbb.run(tmp_path, ["laplace"], TINY)
    assert str(caught.value) == (
        "bbb: prior must be one of gaussian, mixture, mixture-quarter, mixture-narrow, got 'laplace'"
    )
    with pytest.raises(ValueError, match="^bbb: loss must stay finite, got nan in epoch 1$"):
        bbb.run(tmp_path, ["gaussian"], replace(TINY, learning_rate=1e30), progress=False)
    path = tmp_path / "checkpoint.safetensors"
    network, best, other = (bbb.make_network(TINY, n, bbb.PRIORS["gaussian"]) for n in (64, 64, 65))
    bbb.save(path, bbb.State(network, best.state_dict(), [{"epoch": 1}]))
    good = path.read_bytes()
    assert bbb.load(path, network).log == [{"epoch": 1}]
    for write in (
        lambda: path.write_bytes(b"half of it"),
        lambda: path.write_bytes(good[:-1] + bytes([good[-1] ^ 1])),  # of a weight
        lambda: path.write_bytes(good.replace(b'\\"epoch\\": 1', b'\\"epoch\\": 2')),
        lambda: bbb.save(path, bbb.State(other, network.state_dict(), [])),
        lambda: bbb.save(path, bbb.State(network, other.state_dict(), [])),
    ):
        write()
        with pytest.raises(ValueError) as caught:
            bbb.load(path, network)
        assert str(caught.value).startswith(
            f"bbb: {path} must be a checkpoint of this network (delete it to start again), got "
        )
    with pytest.raises(ValueError, match=f"^bbb: {tmp_path} must be a file, got a folder$"):
        bbb.load(tmp_path, network)
